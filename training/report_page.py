"""The HTML of a report: one string, no script, no resource from anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from expertcast.predictors.plain import Json
from expertcast.training.report_parts import Cell, folded, picture, table
from expertcast.training.results import CHAINED, Curve, quality_runs

STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --soft: #5c5c5c; --line: #d9d9d9; --paper: #ffffff; --best: #e3f1ea; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --soft: #a6a6a6; --line: #3d3d3d; --paper: #17181a; --best: #1f3a2e; }
}
body { margin: 2rem auto; padding: 0 1rem; max-width: 72rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { margin: 0 0 .2rem; font-size: 1.6rem; } h2 { margin: 2.2rem 0 .4rem; font-size: 1.2rem; }
p { max-width: 46rem; } .soft { color: var(--soft); }
figure { margin: .8rem 0; } img { max-width: 100%; background: #ffffff; border-radius: 6px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; margin: .4rem 0; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } td.best { background: var(--best); font-weight: 600; }
summary { cursor: pointer; color: var(--soft); margin: .3rem 0; } code { overflow-wrap: anywhere; }
"""
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


def page(
    title: str,
    evaluation: Json,
    pictures: Mapping[str, str],
    learning_curve: Curve | None,
    quality: Json | None,
    provenance: Json,
) -> str:
    """The whole page.

    Args:
        title: its heading.
        evaluation: `Evaluation.as_dict()`.
        pictures: base64 of each PNG, by file name.
        learning_curve: recall by tokens, if there is one.
        quality: result of the quality harness, if there is one.
        provenance: where the numbers come from.
    """
    sections = [
        _summary(evaluation, pictures),
        _layers(evaluation, pictures),
        _ranks(evaluation, pictures),
        _calibration(evaluation, pictures),
        _curve(learning_curve, pictures) if learning_curve else "",
        _quality(quality, pictures) if quality else "",
        _provenance(provenance),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    body = f"<h1>{escape(title)}</h1>\n<p class=soft>{_scored(evaluation)}</p>\n" + "\n".join(filter(None, sections))
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n'
    )


def _scored(evaluation: Json) -> str:
    layers = "1 layer" if evaluation["ahead"] == 1 else f"{evaluation['ahead']} layers"
    split = f" of the {escape(str(evaluation['split']))} split" if "split" in evaluation else ""
    return (
        f"{evaluation['tokens']:,} tokens{split}, forecasts {layers} ahead; "
        f"{evaluation['k']} of {evaluation['experts']} experts per token, {evaluation['layers']} MoE layers"
    )


def _summary(evaluation: Json, pictures: Mapping[str, str]) -> str:
    text = (
        "Recall@k is the share of the experts the router chose that were forecast; with a budget of 1.5k or 2k that "
        "many experts are fetched. Teacher-forced, a forecast starts from the model's own routing. Chained, it starts "
        "from forecasts that were executed, as in speculative execution; the residual stream stays the recorded one."
    )
    parts = ["<h2>Recall per layer</h2>", f"<p>{text}</p>", picture(pictures, "recall.png", "recall per layer")]
    for suffix, form in (("", "teacher-forced"), (CHAINED, "chained")):
        shown = {key: heading for key, heading in METRICS.items() if key + suffix in evaluation}
        if not shown:
            continue
        rows: list[list[Cell]] = [
            [name, *(evaluation[key + suffix][name]["mean"] for key in shown)]
            for name in evaluation["recall_at_k" + suffix]
        ]
        chance: list[Cell] = ["chance", *(evaluation["chance"].get(key) for key in shown)]
        parts.append(table(["mean over layers, " + form, *shown.values()], rows, last=[chance]))
    return "\n".join(parts)


def _layers(evaluation: Json, pictures: Mapping[str, str]) -> str:
    parts = ["<h2>Every layer</h2>", picture(pictures, "weight_covered.png", "router weight covered per layer")]
    for key, heading in METRICS.items():
        for suffix, form in (("", "teacher-forced"), (CHAINED, "chained")):
            if key + suffix not in evaluation:
                continue
            rows: list[list[Cell]] = [
                [name, result["mean"], *result["per_layer"]] for name, result in evaluation[key + suffix].items()
            ]
            headings = ["predictor", "mean", *map(str, evaluation["targets"])]
            parts.append(folded(f"{heading} per layer, {form}", table(headings, rows, ranked=heading)))
    return "\n".join(parts)


def _ranks(evaluation: Json, pictures: Mapping[str, str]) -> str:
    ranks = [f"rank {rank + 1}" for rank in range(evaluation["k"])]
    means: list[list[Cell]] = [[name, *result["mean"]] for name, result in evaluation["rank_alignment"].items()]
    layers: list[list[Cell]] = [
        [f"{name}, layer {layer}", *row]
        for name, result in evaluation["rank_alignment"].items()
        for layer, row in zip(evaluation["targets"], result["per_layer"], strict=True)
    ]
    return "\n".join(
        [
            "<h2>Rank alignment</h2>",
            "<p>How often the expert forecast at a rank (by weight, 1 the heaviest) is the router's at that rank.</p>",
            picture(pictures, "rank_alignment.png", "rank alignment per layer"),
            table(["mean over layers", *ranks], means),
            folded("rank alignment per layer", table(["", *ranks], layers, ranked=None)),
        ]
    )


def _calibration(evaluation: Json, pictures: Mapping[str, str]) -> str:
    text = (
        "An expert's forecast probability is sigmoid(logit - t), with t such that a token's probabilities sum to k. "
        "A point shows, for the experts given about that probability, how often the router chose them; its area grows "
        "with their number. ECE is the mean distance from the diagonal over all (token, expert) pairs; most pairs are "
        "experts that are rightly given a probability near 0, which keeps it small."
    )
    results = evaluation["calibration"]
    ece: list[list[Cell]] = [[name, result["ece"], *result["ece_per_layer"]] for name, result in results.items()]
    bins: list[list[Cell]] = [
        [f"{name}, {b['low']:.1f} to {b['high']:.1f}", b["count"], b["confidence"], b["frequency"]]
        for name, result in results.items()
        for b in result["bins"]
    ]
    return "\n".join(
        [
            "<h2>Calibration</h2>",
            f"<p>{text}</p>",
            picture(pictures, "calibration.png", "reliability diagrams"),
            table(["predictor", "ECE", *(f"layer {layer}" for layer in evaluation["targets"])], ece, ranked="ECE"),
            folded("bins", table(["", "pairs", "mean probability", "how often chosen"], bins, ranked=None)),
        ]
    )


def _curve(curve: Curve, pictures: Mapping[str, str]) -> str:
    sizes = sorted({int(tokens) for points in curve.values() for tokens in points})
    rows: list[list[Cell]] = []
    for name, points in curve.items():
        known = {int(tokens): recall for tokens, recall in points.items()}
        rows.append([name, *(known.get(size) for size in sizes)])
    drawn = picture(pictures, "learning_curve.png", "recall against training tokens")
    numbers = table(["training tokens", *(f"{size:,}" for size in sizes)], rows)
    return f"<h2>Recall against training tokens</h2>\n{drawn}\n{numbers}"


def _quality(quality: Json, pictures: Mapping[str, str]) -> str:
    columns = {"perplexity": "perplexity", "top1_agreement": "top-1 agreement", "kl": "KL"}
    runs = quality_runs(quality)
    rows: list[list[Cell]] = [[name, *(run.get(key) for key in columns)] for name, run in runs.items()]
    domains: list[list[Cell]] = [
        [f"{name}, {domain}", *(values.get(key) for key in columns)]
        for name, run in runs.items()
        for domain, values in run["per_domain"].items()
    ]
    text = (
        "The model run on text with forecasts executed in place of its routers, against the exact model: perplexity, "
        "share of positions with the same most likely next token, and KL from the exact next-token distribution in "
        "nats. Dots in the picture are domains of the text."
    )
    parts = [
        "<h2>What executing forecasts costs the model</h2>",
        f"<p>{text}</p>",
        picture(pictures, "quality.png", "quality per run"),
        table(["run", *columns.values()], rows, ranked=None, digits=4),
    ]
    if domains:
        parts.append(folded("per domain", table(["", *columns.values()], domains, ranked=None, digits=4)))
    return "\n".join(parts)


def _provenance(provenance: Json) -> str:
    rows = "".join(
        f"<tr><th>{escape(str(key))}</th><td><code>{escape(_flat(value))}</code></td></tr>"
        for key, value in provenance.items()
    )
    return f"<h2>Where this comes from</h2>\n<div class=wide><table>{rows}</table></div>"


def _flat(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return str(value)
