"""Draw the figures of an evaluation for the report and TensorBoard; every function returns a matplotlib Figure.

Inputs are the dictionaries of `Evaluation.as_dict()` and of the quality harness.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from expertcast.checkpoints.results import CHAINED, chained_apart
from expertcast.predictors.messages import Json

# Okabe and Ito's colours, which colour-blind readers can distinguish. A predictor has the same colour and marker in
# every figure.

ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#A89600"  # the yellow darkened: lines on white
BLUE, VERMILION, PURPLE, BLACK = "#0072B2", "#D55E00", "#CC79A7", "#222222"
GREY, BROWN = "#767676", "#8A5A3C"
GRID = "#DDDDDD"
STYLES: dict[str, tuple[str, str]] = {
    "frequency": (YELLOW, "v"),
    "previous_token": (BROWN, "^"),
    "router_input": (SKY, "s"),
    "next_norm": (ORANGE, "D"),
    "quasi_hidden": (VERMILION, "o"),
    "linear": (BLUE, "P"),
    "early_attention": (PURPLE, "v"),
    "estimator": (GREEN, "X"),
    "hybrid": (BLACK, "*"),
}
SPARE = ((BLUE, "<"), (ORANGE, ">"), (GREEN, "p"), (PURPLE, "h"), (VERMILION, "d"), (SKY, "8"))


def style(name: str) -> tuple[str, str]:
    """Return colour and marker of a predictor; unknown names get one that depends on the name only."""
    return STYLES.get(name) or SPARE[sum(name.encode()) % len(SPARE)]


def run_colour(run: str) -> str:
    """Return the colour of a quality run: that of the predictor in its name, or grey."""
    named = [name for name in STYLES if name in run]
    return style(max(named, key=len))[0] if named else GREY


def plain_frame(axis: Axes) -> None:
    """Remove the box and draw light grid lines."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color=GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=9)


def named_lines(axis: Axes, series: Mapping[str, Sequence[tuple[float, float | None]]], low: float) -> None:
    """Draw a line per predictor on an axis from `low` to 1."""
    axis.set_ylim(low, 1.0 + 0.02 * (1.0 - low))
    for name, points in series.items():
        known = [(x, y) for x, y in points if y is not None]
        if known:
            colour, marker = style(name)
            axis.plot(*zip(*known, strict=True), color=colour, marker=marker, markersize=5, linewidth=1.5, label=name)
    plain_frame(axis)


def legend(figure: Figure) -> None:
    """Name every line of the figure once, below it."""
    lines = {line.get_label(): line for axis in figure.axes for line in axis.get_lines()}
    named = {name: line for name, line in lines.items() if not str(name).startswith("_")}
    figure.legend(named.values(), map(str, named), loc="outside lower left", ncols=4, frameon=False, fontsize=9)


def chance_line(axis: Axes, level: float) -> None:
    """Draw a dashed line at the score of random forecasts."""
    axis.axhline(level, color=GREY, linewidth=1.0, linestyle="--")
    axis.annotate(
        f"chance {level:.3f}", (0.01, level), xycoords=("axes fraction", "data"), fontsize=8, color=GREY, va="bottom"
    )


def floor(values: Iterable[float | None]) -> float:
    """Return a round lower limit for an axis up to 1 that shows every value."""
    known = [value for value in values if value is not None]
    return max(0.0, math.floor(20 * (min(known, default=0.0) - 0.02)) / 20)


LABELS = {"recall_at_k": "recall@k", "weight_covered": "router weight covered"}


def recall_by_layer(values: Json, metric: str = "recall_at_k") -> Figure:
    """Plot a metric by target layer and predictor, teacher-forced and chained side by side.

    The chained panel has only predictors whose scores differ there. If weak predictors compress the scale, a second row
    shows the others enlarged. Follows Madan et al. (Speculating Experts, 2026, figures 4 and 10).
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
            scored = [name for name in names if name in results]
            series = {name: list(zip(values["targets"], results[name]["per_layer"], strict=True)) for name in scored}
            named_lines(axis, series, low)
            if level is not None and level >= low:
                chance_line(axis, level)
            axis.set_title(f"{label}, {form}" + ", close up" * (low > rows[0][1]), fontsize=11)
            axis.set_xticks(values["targets"][:: math.ceil(len(values["targets"]) / 12)])
        row[0].set_ylabel(label)
    for axis in axes[-1]:
        axis.set_xlabel("MoE layer forecast")
    legend(figure)
    return figure


def _lowest(panels: Json, names: Iterable[str], level: float | None = None) -> float:
    """Return the lower axis limit for some predictors over all panels and the chance level, if any."""
    scored = [result[name]["per_layer"] for result in panels.values() for name in names if name in result]
    return floor([level, *(value for layers in scored for value in layers)])


def expert_recall(values: Json, name: str) -> Figure:
    """Plot recall of every expert of every layer by one predictor, and its use relative to an even distribution."""
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
    """Plot P[forecast expert at rank r = true expert at rank r], a heat map of layers and ranks per predictor.

    Follows Madan et al. (Speculating Experts, 2026, figure 5).
    """
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
    """Create a figure with at most four panels in a row; `frame` and `panel` are widths and heights in inches."""
    columns = min(4, count)
    rows = math.ceil(count / columns)
    size = (frame[0] + panel[0] * columns, frame[1] + panel[1] * rows)
    figure = Figure(figsize=size, layout="constrained")
    axes: list[Axes] = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    for axis in axes[count:]:
        axis.set_axis_off()
    return figure, axes


def calibration(values: Json) -> Figure:
    """Plot the reliability of forecast probabilities, one panel per predictor; point areas show numbers of pairs."""
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
    figure.supylabel("observed frequency", fontsize=10)
    figure.suptitle("Calibration (dashed: perfect calibration)", fontsize=11)
    return figure


def quality_bars(quality: Json) -> Figure:
    """Plot perplexity, top-1 agreement and KL of each way to run; dots are domains of the text."""
    panels = (
        ("perplexity", "perplexity (lower is better)"),
        ("top1_agreement", "top-1 agreement with exact"),
        ("kl", "KL from exact (nats per token)"),
    )
    found = quality["runs"]
    runs = list(found)
    figure = Figure(figsize=(12.4, 1.3 + 0.36 * len(runs)), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True)
    for axis, (key, title) in zip(axes, panels, strict=True):
        values = [found[run].get(key) or 0.0 for run in runs]
        axis.barh(range(len(runs)), values, color=[run_colour(run) for run in runs], height=0.66)
        dots = [
            (domain[key], row)
            for row, run in enumerate(runs)
            for domain in found[run]["domains"].values()
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
