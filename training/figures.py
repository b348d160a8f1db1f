"""Figures of an evaluation, for the report and for TensorBoard; every function gives a matplotlib Figure.

They read the dictionaries that `Evaluation.as_dict()` and the quality harness make.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from expertcast.predictors.plain import Json
from expertcast.training.drawing import (
    BLACK,
    GREY,
    chance_line,
    floor,
    named_lines,
    plain_frame,
    run_colour,
    short,
    style,
)
from expertcast.training.results import CHAINED, Curve, chained_apart, quality_runs

LABELS = {"recall_at_k": "recall@k", "weight_covered": "router weight covered"}


def recall_by_layer(values: Json, metric: str = "recall_at_k") -> Figure:
    """A metric per target layer and predictor, teacher-forced and chained side by side (Fig. 4, 10), the latter for
    predictors that score otherwise there.

    Where weak predictors press the others together, a second row shows the others close up.
    """
    panels = {"teacher-forced": values[metric]}
    apart = chained_apart(values)
    if apart and metric + CHAINED in values:
        panels["chained"] = {name: values[metric + CHAINED][name] for name in apart}
    level, label = values["chance"].get(metric), LABELS.get(metric, metric)
    rows = [(list(values[metric]), _lowest(panels, values[metric], level))]
    strong = [name for name, result in values[metric].items() if (result["mean"] or 0.0) > (1.0 + rows[0][1]) / 2]
    if strong and _lowest(panels, strong) >= rows[0][1] + 0.2:
        rows.append((strong, _lowest(panels, strong)))
    figure = Figure(
        figsize=(1.0 + 5.6 * len(panels), 0.4 + 3.9 * len(rows)), layout=ConstrainedLayoutEngine(h_pad=0.12)
    )
    axes = figure.subplots(len(rows), len(panels), squeeze=False)
    for (names, low), row in zip(rows, axes, strict=True):
        for axis, (form, results) in zip(row, panels.items(), strict=True):
            scored = [name for name in names if name in results]  # chained, not all are
            series = {name: list(zip(values["targets"], results[name]["per_layer"], strict=True)) for name in scored}
            named_lines(axis, series, low)
            if level is not None and level >= low:
                chance_line(axis, level)
            axis.set_title(f"{label}, {form}" + ", close up" * (low > rows[0][1]), fontsize=11)
            axis.set_xticks(values["targets"][:: math.ceil(len(values["targets"]) / 12)])
        row[0].set_ylabel(label)
    for axis in axes[-1]:
        axis.set_xlabel("MoE layer forecast")
    return figure


def _lowest(panels: Json, names: Iterable[str], level: float | None = None) -> float:
    """Lower end of the axis for some predictors in all panels, and the chance level if given."""
    scored = [result[name]["per_layer"] for result in panels.values() for name in names if name in result]
    return floor([level, *(value for layers in scored for value in layers)])


def learning_curve(curve: Curve) -> Figure:
    """Mean recall@k against training tokens (Fig. 9)."""
    figure = Figure(figsize=(6.6, 4.4), layout="constrained")
    axis = figure.subplots()
    series = {
        name: sorted((float(tokens), recall) for tokens, recall in points.items()) for name, points in curve.items()
    }
    axis.set_xscale("log")
    named_lines(axis, series, floor(y for points in series.values() for _, y in points))
    ticks = sorted({tokens for points in series.values() for tokens, _ in points})
    axis.set_xticks(ticks, [short(tick) for tick in ticks])
    axis.minorticks_off()
    axis.set(title="What training tokens buy", xlabel="training tokens (log scale)", ylabel="mean recall@k")
    return figure


def expert_recall(values: Json, name: str) -> Figure:
    """Recall of every expert of every layer by one predictor, and how often each is used over an even share."""
    used, found, targets = values["per_expert"]["used"], values["per_expert"]["found"][name], values["targets"]
    even = values["tokens"] * values["k"] / values["experts"]
    recall = [
        [hits / count if count else math.nan for hits, count in zip(*layer, strict=True)]
        for layer in zip(found, used, strict=True)
    ]
    use = [[count / even for count in layer] for layer in used]
    figure = Figure(figsize=(12.4, 1.5 + min(5.0, 0.22 * len(targets))), layout="constrained")
    shown = range(0, len(targets), math.ceil(len(targets) / 12))
    panels = ((recall, f"recall by {name}", 1.0), (use, "use (1: an even share)", 2.0))
    for axis, (grid, title, most) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        image = axis.imshow(grid, vmin=0, vmax=most, cmap="viridis", aspect="auto", interpolation="nearest")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("expert", fontsize=10)
        axis.set_yticks(list(shown), [str(targets[index]) for index in shown])
        figure.colorbar(image, ax=axis, extend="max" if most > 1 else "neither", pad=0.01)
    figure.axes[0].set_ylabel("MoE layer", fontsize=10)
    return figure


def rank_alignment(values: Json) -> Figure:
    """P[forecast expert at rank r is the true one], a heat map of layers and ranks per predictor (Fig. 5)."""
    results = values["rank_alignment"]
    ranks, targets = values["k"], values["targets"]
    cell = max(0.24, min(0.5, 3.0 / ranks))
    figure, axes = _panels(len(results), (1.2, 0.5), (2.9, 0.9 + cell * ranks))
    for axis, (name, result) in zip(axes, results.items(), strict=False):
        grid = list(zip(*result["per_layer"], strict=True))  # ranks down, layers across
        axis.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto", interpolation="nearest")
        axis.set_title(f"{name} ({sum(result['mean']) / ranks:.2f})", fontsize=10)
        axis.set_yticks(range(ranks), [str(rank + 1) for rank in range(ranks)])
        shown = range(0, len(targets), math.ceil(len(targets) / 6))
        axis.set_xticks(list(shown), [str(targets[i]) for i in shown])
    figure.supxlabel("MoE layer forecast", fontsize=10)
    figure.supylabel("rank by weight", fontsize=10)
    figure.suptitle("Same expert at the same rank (mean in brackets)", fontsize=11)
    figure.colorbar(axes[0].get_images()[0], ax=axes, label="probability", shrink=0.9)
    return figure


def _panels(count: int, frame: tuple[float, float], panel: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """A figure of so many panels, at most four in a row, with a frame around them; sizes as width and height."""
    columns = min(4, count)
    rows = math.ceil(count / columns)
    size = (frame[0] + panel[0] * columns, frame[1] + panel[1] * rows)
    figure = Figure(figsize=size, layout="constrained")
    axes: list[Axes] = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    for axis in axes[count:]:
        axis.set_axis_off()
    return figure, axes


def calibration(values: Json) -> Figure:
    """Reliability of the forecast probabilities, one panel per predictor; a point's area is its share of pairs."""
    results = values["calibration"]
    figure, axes = _panels(len(results), (0.8, 0.7), (2.5, 2.4))
    for axis, (name, result) in zip(axes, results.items(), strict=False):
        filled = [entry for entry in result["bins"] if entry["count"]]
        most = max(entry["count"] for entry in filled)
        points = [(entry["confidence"], entry["frequency"]) for entry in filled]
        colour = style(name)[0]
        axis.plot([0, 1], [0, 1], color=GREY, linewidth=0.8, linestyle="--")
        axis.plot(*zip(*points, strict=True), color=colour, linewidth=1.4)
        sizes = [8 + 90 * entry["count"] / most for entry in filled]
        axis.scatter([x for x, _ in points], [y for _, y in points], s=sizes, color=colour)
        axis.set_title(f"{name} (ECE {result['ece']:.3f})", fontsize=10)
        axis.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), aspect="equal")
        plain_frame(axis)
    figure.supxlabel("forecast probability that the expert is used", fontsize=10)
    figure.supylabel("how often it is used", fontsize=10)
    figure.suptitle("Calibration (dashed: a forecast that means what it says)", fontsize=11)
    return figure


def quality_bars(quality: Json) -> Figure:
    """What each way to run costs the model: perplexity, top-1 agreement and KL; dots are the text's domains."""
    panels = (
        ("perplexity", "perplexity (lower is better)"),
        ("top1_agreement", "top-1 agreement with exact"),
        ("kl", "KL from exact (nats per token)"),
    )
    quality = quality_runs(quality)
    runs = list(quality)
    figure = Figure(figsize=(12.4, 1.3 + 0.36 * len(runs)), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True)
    for axis, (key, title) in zip(axes, panels, strict=True):
        values = [quality[run].get(key) or 0.0 for run in runs]
        axis.barh(range(len(runs)), values, color=[run_colour(run) for run in runs], height=0.66)
        dots = [
            (domain[key], row)
            for row, run in enumerate(runs)
            for domain in quality[run]["per_domain"].values()
            if domain.get(key) is not None
        ]
        if dots:
            axis.scatter(*zip(*dots, strict=True), s=9, color="white", edgecolors=BLACK, linewidths=0.6, zorder=3)
        limit = max([*values, *(value for value, _ in dots)]) or 1.0
        for row, value in enumerate(values):
            axis.annotate(f" {value:.4g}", (limit * 1.03, row), va="center", fontsize=8)
        axis.set(title=title, xlim=(0, limit * 1.22))
        axis.title.set_fontsize(10)
        plain_frame(axis)
    axes[0].set_yticks(range(len(runs)), runs)
    axes[0].invert_yaxis()
    return figure
