"""What a report shows beside its tables: colours of shares, heat map, example text, each expert, what scripts read."""

from __future__ import annotations

from bisect import bisect_right

import matplotlib
from matplotlib.colors import to_hex, to_rgb

from expertcast.predictors.plain import Json
from expertcast.training.report_rows import forms_of, shown_metrics

BANDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)
"""Lower ends of the shares that have a colour of their own: narrower where good forecasts differ."""
RARE = 20
"""Experts that the table of the worst forecast ones lists."""
LEAST_USE = 0.25
"""Of an even share of the tokens: experts needed less often are left out of that table, by chance they are anywhere."""


def band_class(share: float | None) -> str:
    """The class of the colour of a share of 0..1; no class for none."""
    # the same tolerance as the page's script: a mean of exact counts is not put below its bound by rounding
    return "" if share is None else f"b{bisect_right(BANDS, share + 1e-9) - 1}"


def band_colours() -> list[tuple[str, str]]:
    """Background and ink of each band: matplotlib's viridis, in which colour-blind readers see the same order, and
    black or white, whichever stands out more."""
    scale = matplotlib.colormaps["viridis"]
    backgrounds = [to_hex(scale(index / (len(BANDS) - 1))) for index in range(len(BANDS))]
    return [(colour, max(("#000000", "#ffffff"), key=lambda ink: contrast(ink, colour))) for colour in backgrounds]


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours, 1 to 21 (WCAG 2)."""
    low, high = sorted(_luminance(colour) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    linear: list[float] = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(colour)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def views(evaluation: Json, examples: Json | None, chosen: str) -> Json:
    """What the template reads beside the rows of :func:`routing_rows`; the `chosen` predictor is shown first."""
    recall = evaluation["recall_at_k"]
    columns = [[result["mean"], *result["per_layer"]] for result in recall.values()]
    return {
        "predictors": list(recall),
        "bands": BANDS,
        "band_colours": band_colours(),
        "heat": [list(row) for row in zip(*columns, strict=True)],
        "chance_row": [evaluation["chance"]["recall_at_k"]] * len(recall),
        "passages": []
        if examples is None
        else [_passage(each, chosen, evaluation["k"]) for each in examples["passages"]],
        "note": None if examples is None else examples["note"],
        **_rare_experts(evaluation, chosen),
        "script_data": _script_data(evaluation, examples, chosen),
    }


def _passage(passage: Json, name: str, top_k: int) -> Json:
    """Each token's text, share of experts forecast (mean over layers) and the same in words."""
    texts = passage["text"] or [f"{token} " for token in passage["token_ids"] or ["?"] * len(passage["found"][name][0])]
    means = [sum(column) / len(column) for column in zip(*passage["found"][name], strict=True)]
    tokens = [(text, mean / top_k, f"{mean:.1f} of {top_k}") for text, mean in zip(texts, means, strict=True)]
    return {"document": passage["document"], "domain": passage["domain"], "tokens": tokens}


def _rare_experts(evaluation: Json, chosen: str) -> Json:
    """The experts that the chosen predictor finds least often, with what the others find of them."""
    if "per_expert" not in evaluation:
        return {"rare": [], "rare_headings": []}
    used, found = evaluation["per_expert"]["used"], evaluation["per_expert"]["found"]
    names = [chosen, *(name for name in found if name != chosen)]
    least = LEAST_USE * evaluation["tokens"] * evaluation["k"] / evaluation["experts"]
    rows = [
        [f"layer {layer}, expert {expert}", count, count / evaluation["tokens"]]
        + [found[name][index][expert] / count for name in names]
        for index, layer in enumerate(evaluation["targets"])
        for expert, count in enumerate(used[index])
        if count and count >= least
    ]
    return {
        "rare": sorted(rows, key=lambda row: (row[3], -row[1]))[:RARE],
        "rare_headings": ["expert", "tokens", "share of tokens", *names],
    }


def _script_data(evaluation: Json, examples: Json | None, chosen: str) -> Json:
    heat = {}
    for form, suffix, names in forms_of(evaluation):
        for key, heading in shown_metrics(evaluation).items():
            results = evaluation.get(key + suffix, {})
            values = {name: [results[name]["mean"], *results[name]["per_layer"]] for name in names if name in results}
            if values:
                chance = evaluation["chance"].get(key)
                heat[heading + (f", {form}" if suffix else "")] = {"values": values, "chance": chance}
    for distance, further in evaluation.get("further", {}).items():  # its first targets are of no forecast so far off
        missing = [None] * (further["ahead"] - evaluation["ahead"])
        found = further["recall_at_k"].items()
        values = {name: [result["mean"], *missing, *result["per_layer"]] for name, result in found}
        chance = further["chance"]["recall_at_k"]
        heat[f"recall@k, {distance} layers ahead"] = {"values": values, "chance": chance}
    return {
        "bands": BANDS,
        "chosen": chosen,
        "predictors": list(evaluation["recall_at_k"]),
        "targets": [str(layer) for layer in evaluation["targets"]],
        "k": evaluation["k"],
        "tokens": evaluation["tokens"],
        "heat": heat,
        "experts": evaluation.get("per_expert"),
        "passages": [] if examples is None else [each["found"] for each in examples["passages"]],
    }
