"""The HTML of a report: the template report.html filled in; no script, no resource from anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from expertcast.predictors.plain import Json
from expertcast.training.results import CHAINED, Curve, quality_runs

METRICS = {
    "recall_at_k": "recall@k",
    "recall_at_1.5k": "recall@1.5k",
    "recall_at_2k": "recall@2k",
    "weight_covered": "weight covered",
    "exact_set": "exact set",
    "hard_match": "hard match",
    "soft_match": "soft match",
    "mismatch": "mismatch",
    "cosine": "cosine",
}
"""Metrics with one number per layer, and their headings."""
FORMS = (("", "teacher-forced"), (CHAINED, "chained"))
LOWER_IS_BETTER = {"mismatch", "ECE"}
NOT_RANKED = {"soft match"}
QUALITY = ("perplexity", "top1_agreement", "kl")
Cell = str | float | int | None


def page(data: Json, pictures: Mapping[str, str]) -> str:
    """The whole page, of the numbers that stand in report.json and the base64 of each PNG by file name."""
    # lines that hold only a tag of the template leave nothing behind
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    tables = _routing_rows(data["evaluation"]) | _curve_rows(data["learning_curve"] or {})
    tables |= _quality_rows(data["quality"] or {})
    environment.globals |= {"best_cells": best_cells, "cell": cell, "pictures": pictures}
    return environment.get_template("report.html").render(**data, **tables)


def best_cells(headings: Sequence[str], rows: Sequence[Sequence[Cell]], ranked: str | None) -> list[Cell]:
    """The best value of each column, None where it has none to mark.

    Args:
        ranked: what every column measures, "" when each column's heading says it, None to mark nothing.
    """
    best: list[Cell] = [None]
    for column, heading in enumerate(headings[1:], start=1):
        what = ranked or heading
        values = [value for row in rows if isinstance(value := row[column], int | float)]
        if ranked is None or what in NOT_RANKED or len(values) < 2:
            best.append(None)
        else:
            best.append(min(values) if what in LOWER_IS_BETTER else max(values))
    return best


def cell(value: Cell, digits: int = 3) -> str:
    """A number with so many digits, or as it is counted; a dash for none."""
    if isinstance(value, float):
        return f"{value:.{digits}f}"
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if value is None else value


def _routing_rows(evaluation: Json) -> Json:
    """Rows of the tables of forecasts; the first cell names the row."""
    means, layers, targets = [], [], [str(layer) for layer in evaluation["targets"]]
    for suffix, form in FORMS:
        shown = {key: heading for key, heading in METRICS.items() if key + suffix in evaluation}
        rows = [
            [name, *(evaluation[key + suffix][name]["mean"] for key in shown)]
            for name in evaluation.get("recall_at_k" + suffix, ())
        ]
        chance = ["chance", *(evaluation["chance"].get(key) for key in shown)]
        if shown:
            means.append((form, list(shown.values()), rows, chance))
    for key, heading in METRICS.items():
        for suffix, form in FORMS:
            if results := evaluation.get(key + suffix):
                rows = [[name, result["mean"], *result["per_layer"]] for name, result in results.items()]
                layers.append((heading, form, rows))
    ranks, calibration = evaluation["rank_alignment"].items(), evaluation["calibration"].items()
    return {
        "means": means,
        "layers": layers,
        "targets": targets,
        "target_layers": [f"layer {layer}" for layer in targets],
        "ranks": [f"rank {rank + 1}" for rank in range(evaluation["k"])],
        "rank_means": [[name, *result["mean"]] for name, result in ranks],
        "rank_layers": [
            [f"{name}, layer {layer}", *row]
            for name, result in ranks
            for layer, row in zip(targets, result["per_layer"], strict=True)
        ],
        "errors": [[name, result["ece"], *result["ece_per_layer"]] for name, result in calibration],
        "bins": [
            [f"{name}, {b['low']:.1f} to {b['high']:.1f}", b["count"], b["confidence"], b["frequency"]]
            for name, result in calibration
            for b in result["bins"]
        ],
    }


def _curve_rows(curve: Curve) -> Json:
    known = {name: {int(tokens): recall for tokens, recall in points.items()} for name, points in curve.items()}
    sizes = sorted({tokens for points in known.values() for tokens in points})
    rows = [[name, *(points.get(size) for size in sizes)] for name, points in known.items()]
    return {"sizes": [f"{size:,}" for size in sizes], "curve": rows}


def _quality_rows(quality: Json) -> Json:
    runs = quality_runs(quality)
    domains = [
        [f"{name}, {domain}", *(values.get(key) for key in QUALITY)]
        for name, run in runs.items()
        for domain, values in run["per_domain"].items()
    ]
    return {"runs": [[name, *(run.get(key) for key in QUALITY)] for name, run in runs.items()], "domains": domains}
