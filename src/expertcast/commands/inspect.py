"""`expertcast inspect`: say what a model, traces folder or checkpoint is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from expertcast.checkpoints.store import PredictorCheckpoint, holds_predictor
from expertcast.commands.options import Option
from expertcast.commands.output import Outcome, describe_traces, table
from expertcast.data.inspection import inspect_model
from expertcast.data.layout import TRACE_FILE
from expertcast.data.traces import TraceDataset


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `expertcast inspect` takes."""

    target: Annotated[str, Option(positional=True, metavar="MODEL|TRACES|CKPT")]
    """What to look at."""


def run(options: Options) -> Outcome:
    """Read what describes it; no weight is read."""
    folder = Path(options.target)
    if (folder / TRACE_FILE).is_file():
        traces = TraceDataset.open(folder)
        return dict(traces.info), describe_traces(traces)
    if holds_predictor(folder):
        checkpoint = PredictorCheckpoint.open(folder)
        recall = checkpoint.metrics.get("recall_at_k", {}).get(checkpoint.name)
        return checkpoint.config, table({**checkpoint.config, "recall_at_k": recall})
    report = asdict(inspect_model(options.target))
    return report, table({key: value for key, value in report.items() if value != ""})
