"""What a report says of where its numbers come from: command, date, traces, and how the predictors were made."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from expertcast.checkpoints.provenance import provenance
from expertcast.data.traces import TraceSource
from expertcast.predictors.plain import Json
from expertcast.training.options import Fitted

_OF_TRACES = (
    "model", "id", "tokens", "splits", "window", "seed", "shape", "settings", "collection_s", "command",
    "expertcast_version", "git_revision", "python_version", "versions",
)  # fmt: skip


def now() -> str:
    """The date and time in UTC, to the minute."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def report_sources(source: TraceSource, fitted: Mapping[str, Fitted]) -> Json:
    """Where an evaluation's numbers come from, as plain values.

    Args:
        source: the traces that were scored, and fitted on.
        fitted: the predictors by name, with the reports of their fits.

    Returns:
        `date`, this process's command, revision and versions; `traces`, with the tokens of each domain; `predictors`,
        each with its config and how it was trained.
    """
    domains: dict[str, int] = {}
    for document in source.documents:
        domain = document.domain or "(none named)"
        domains[domain] = domains.get(domain, 0) + document.tokens
    traces = {key: source.info[key] for key in _OF_TRACES if key in source.info}
    return {
        "date": now(),
        **provenance(),
        "traces": {**traces, "documents": len(source.documents), "tokens by domain": domains},
        "predictors": {
            name: {"config": made.predictor.config.as_dict(), "training": dict(made.report)}
            for name, made in fitted.items()
        },
    }
