"""The tables of a report: rows of an evaluation's numbers, the first cell of each names it."""

from __future__ import annotations

from expertcast.predictors.plain import Json
from expertcast.training.ledger import COLUMNS as LEDGER_COLUMNS
from expertcast.training.ledger import ledger_rows
from expertcast.training.results import CHAINED, Curve, chained_apart, quality_runs

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
SCORES = ("perplexity", "top1_agreement", "kl")


def forms_of(evaluation: Json) -> list[tuple[str, str, list[str]]]:
    """The forms that are shown: name, ending of their metrics, and predictors; chained, only those that differ."""
    forms = [("teacher-forced", "", list(evaluation["recall_at_k"]))]
    apart = chained_apart(evaluation)
    return [*forms, ("chained", CHAINED, apart)] if apart else forms


def chained_words(evaluation: Json) -> str:
    """One sentence on whose chained scores are left out, and why; none where none are."""
    chained, apart = evaluation.get("recall_at_k" + CHAINED, {}), chained_apart(evaluation)
    same = [name for name in chained if name not in apart]
    return f"Chained, {', '.join(same)} score as they do teacher-forced and are not shown again." if same else ""


def shown_metrics(evaluation: Json) -> dict[str, str]:
    """Metrics of one number per layer, with their headings."""
    timely = [key for key in evaluation if key.startswith("timely") and not key.endswith(CHAINED)]
    return METRICS | {key: key.replace("_", " ") for key in timely}


def routing_rows(evaluation: Json) -> Json:
    """Rows of the tables of forecasts; the first cell names the row."""
    means, layers, targets = [], [], [str(layer) for layer in evaluation["targets"]]
    metrics = shown_metrics(evaluation)
    timely = {key: heading for key, heading in metrics.items() if key not in METRICS}
    for form, suffix, names in forms_of(evaluation):
        for what, group in ((form, METRICS), (f"{form}, in time", timely)):
            shown = {key: heading for key, heading in group.items() if key + suffix in evaluation}
            rows = [[name, *(evaluation[key + suffix][name]["mean"] for key in shown)] for name in names]
            chance = [["chance", *(evaluation["chance"].get(key) for key in shown)]] if group is METRICS else []
            if shown:
                means.append((what, list(shown.values()), rows, chance))
    for key, heading in metrics.items():
        tables = [
            (form, [[name, results[name]["mean"], *results[name]["per_layer"]] for name in names])
            for form, suffix, names in forms_of(evaluation)
            if (results := evaluation.get(key + suffix))
        ]
        layers.append((heading, tables))
    ranks, calibration = evaluation["rank_alignment"].items(), evaluation["calibration"].items()
    return {
        "means": means,
        "layers": layers,
        "targets": targets,
        "chained_words": chained_words(evaluation),
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
            [name, *(each[key] for key in ("ece", "ece_likely") for each in (result["before"], result))]
            for name, result in calibration
        ],
        "layer_errors": [[name, *result["ece_per_layer"]] for name, result in calibration],
        "bins": [
            [f"{name}, {b['low']:.1f} to {b['high']:.1f}", b["count"], b["confidence"], b["frequency"]]
            for name, result in calibration
            for b in result["bins"]
        ],
    }


def distance_rows(evaluation: Json) -> Json:
    """Rows of mean recall@k by distance, none where one distance was scored."""
    scored = {str(evaluation["ahead"]): evaluation} | evaluation.get("further", {})
    if len(scored) < 2:
        return {"distances": [], "distance_rows": []}
    names = evaluation["recall_at_k"]
    rows = [[name, *(each["recall_at_k"].get(name, {}).get("mean") for each in scored.values())] for name in names]
    return {"distances": [f"{distance} ahead" for distance in scored], "distance_rows": rows}


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
