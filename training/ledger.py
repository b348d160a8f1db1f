"""What a predictor costs: numbers it keeps, bytes, time per forecast, and the seconds it took to get there."""

from __future__ import annotations

from collections.abc import Mapping

from expertcast.predictors import Predictor
from expertcast.predictors.plain import Json, aligned

COLUMNS = (
    ("parameters", "parameters", "{:,}"),
    ("bytes", "bytes", "{:,}"),
    ("forecast_ms", "ms per forecast", "{:.3f}"),
    ("training_s", "training s", "{:.1f}"),
    ("collection_s", "collection s", "{:.1f}"),
)
"""Members of an entry, with their headings in tables and how they are written."""


def ledger_entry(predictor: Predictor, report: Json, forecast_s: float | None) -> Json:
    """One predictor's costs, None where one is not known.

    Args:
        predictor: its state dict is what it keeps, default vectors and counts included, and the numbers of its
            calibration.
        report: of its fit, in a checkpoint the member `training`.
        forecast_s: seconds of one forecast for one token on this machine, mean over layers.

    Returns:
        `parameters`, `bytes`, `forecast_ms`; `training_s`, with the seconds of candidates that were fitted before; and
        `collection_s` of the traces, None where they say nothing of it or the model was run in training itself.
    """
    tensors = list(predictor.state_dict().values())
    readings = 3 * sum(len(pairs) for pairs in predictor.calibration.values())
    trained = report.get("seconds")
    return {
        "parameters": sum(tensor.numel() for tensor in tensors) + readings,
        "bytes": sum(tensor.nbytes for tensor in tensors) + 8 * readings,
        "forecast_ms": None if forecast_s is None else 1e3 * forecast_s,
        "training_s": None if trained is None else trained + report.get("known_seconds", 0.0),
        "collection_s": report.get("collection_s"),
    }


def ledger_rows(ledger: Mapping[str, Json]) -> list[list[str]]:
    """A row of text per predictor, a dash for what is not known."""
    return [
        [name, *("-" if entry.get(key) is None else form.format(entry[key]) for key, _, form in COLUMNS)]
        for name, entry in ledger.items()
    ]


def ledger_table(ledger: Mapping[str, Json]) -> str:
    """A text table for the terminal."""
    return aligned([["predictor", *(heading for _, heading, _ in COLUMNS)], *ledger_rows(ledger)])
