"""The tables of a report: rows of an evaluation's numbers, the first cell of each names it."""

from __future__ import annotations

from expertcast.predictors.plain import Json
from expertcast.training.ledger import COLUMNS as LEDGER_COLUMNS
from expertcast.training.ledger import ledger_rows
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
"""Metrics with one number per layer, and their headings; those of timely recall go by their links."""
FORMS = (("", "teacher-forced"), (CHAINED, "chained"))
SCORES = ("perplexity", "top1_agreement", "kl")


def routing_rows(evaluation: Json) -> Json:
    """Rows of the tables of forecasts; the first cell names the row."""
    means, layers, targets = [], [], [str(layer) for layer in evaluation["targets"]]
    timely = [key for key in evaluation if key.startswith("timely") and not key.endswith(CHAINED)]
    metrics = METRICS | {key: key.replace("_", " ") for key in timely}
    for suffix, form in FORMS:
        shown = {key: heading for key, heading in metrics.items() if key + suffix in evaluation}
        rows = [
            [name, *(evaluation[key + suffix][name]["mean"] for key in shown)]
            for name in evaluation.get("recall_at_k" + suffix, ())
        ]
        chance = ["chance", *(evaluation["chance"].get(key) for key in shown)]
        if shown:
            means.append((form, list(shown.values()), rows, chance))
    for key, heading in metrics.items():
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
        "ledger": ledger_rows(evaluation.get("ledger", {})),
        "costs": [heading for _, heading, _ in LEDGER_COLUMNS],
        "rank_means": [[name, *result["mean"]] for name, result in ranks],
        "rank_layers": [
            [f"{name}, layer {layer}", *row]
            for name, result in ranks
            for layer, row in zip(targets, result["per_layer"], strict=True)
        ],
        "errors": [
            [
                name,
                *(each[key] for key in ("ece", "ece_likely") for each in (result["before"], result)),
                *result["ece_per_layer"],
            ]
            for name, result in calibration
        ],
        "bins": [
            [f"{name}, {b['low']:.1f} to {b['high']:.1f}", b["count"], b["confidence"], b["frequency"]]
            for name, result in calibration
            for b in result["bins"]
        ],
    }


def curve_rows(curve: Curve) -> Json:
    """Rows of the learning curve."""
    known = {name: {int(tokens): recall for tokens, recall in points.items()} for name, points in curve.items()}
    sizes = sorted({tokens for points in known.values() for tokens in points})
    rows = [[name, *(points.get(size) for size in sizes)] for name, points in known.items()]
    return {"sizes": [f"{size:,}" for size in sizes], "curve": rows}


def quality_rows(quality: Json) -> Json:
    """Rows of what executing forecasts costs, in the mean and per domain."""
    runs = quality_runs(quality)
    domains = [
        [f"{name}, {domain}", *(values.get(key) for key in SCORES)]
        for name, run in runs.items()
        for domain, values in run["per_domain"].items()
    ]
    return {"runs": [[name, *(run.get(key) for key in SCORES)] for name, run in runs.items()], "domains": domains}
