"""How the figures draw: colours, frames, and lines that carry their names at their ends.

Colours are Okabe and Ito's, which stay apart for colour-blind readers; a predictor has the same colour and
marker in every figure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes

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
LABEL_GAP = 0.048
"""Least distance between two names at the ends of lines, as a share of the axis."""


def style(name: str) -> tuple[str, str]:
    """Colour and marker of a predictor; names without one of their own get one that depends on the name only."""
    return STYLES.get(name) or SPARE[sum(name.encode()) % len(SPARE)]


def run_colour(run: str) -> str:
    """Colour of a quality run: that of the predictor named in it, grey if there is none."""
    named = [name for name in STYLES if name in run]
    return style(max(named, key=len))[0] if named else GREY


def plain_frame(axis: Axes) -> None:
    """No box, a light grid along the values."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color=GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=9)


def named_lines(axis: Axes, series: Mapping[str, Sequence[tuple[float, float | None]]], low: float) -> None:
    """Draw a line per predictor from `low` up to 1, its name at its right end, and never two names on each other."""
    axis.set_ylim(low, 1.0 + 0.02 * (1.0 - low))
    ends: dict[str, tuple[float, float]] = {}
    for name, points in series.items():
        known = [(x, y) for x, y in points if y is not None]
        if not known:
            continue
        colour, marker = style(name)
        xs, ys = zip(*known, strict=True)
        axis.plot(xs, ys, color=colour, marker=marker, markersize=5, linewidth=1.5, label=name)
        ends[name] = known[-1]
    right = max((x for x, _ in ends.values()), default=1.0)
    heights = spread({name: y for name, (_, y) in ends.items()}, LABEL_GAP * (1.0 - low), low, 1.0)
    for name, height in heights.items():
        colour, beside = style(name)[0], (1.05, (height - low) / (axis.get_ylim()[1] - low))
        axis.text(*beside, f" {name}  ", transform=axis.transAxes, color=BLACK, fontsize=9, va="center")
        leader = {"arrowstyle": "-", "color": colour, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 5}
        axis.annotate("", (right, ends[name][1]), beside, textcoords="axes fraction", arrowprops=leader)
    plain_frame(axis)


def chance_line(axis: Axes, level: float) -> None:
    """A dashed line where random forecasts would be."""
    axis.axhline(level, color=GREY, linewidth=1.0, linestyle="--")
    axis.annotate(
        f"chance {level:.3f}", (0.01, level), xycoords=("axes fraction", "data"), fontsize=8, color=GREY, va="bottom"
    )


def floor(values: Iterable[float | None]) -> float:
    """A round lower end of an axis up to 1 that shows every value."""
    known = [value for value in values if value is not None]
    return max(0.0, math.floor(20 * (min(known, default=0.0) - 0.02)) / 20)


def short(number: float) -> str:
    """20000 as 20k, 1500000 as 1.5M."""
    for size, suffix in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{suffix}"
    return f"{number:.3g}"


def spread(heights: Mapping[str, float], gap: float, low: float, high: float) -> dict[str, float]:
    """Move heights as little as possible (in squares) so that none is closer to the next than `gap`.

    They stay between `low` and `high`. Without the gaps this is isotonic regression: neighbours that would swap are
    pooled at their mean.
    """
    names = sorted(heights, key=lambda name: heights[name])
    pools: list[tuple[float, int]] = []
    for index, name in enumerate(names):
        pools.append((heights[name] - index * gap, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (upper, many), (lower, few) = pools.pop(), pools.pop()
            pools.append(((upper * many + lower * few) / (many + few), many + few))
    bases = [min(max(base, low), high - (len(names) - 1) * gap) for base, count in pools for _ in range(count)]
    return {name: base + index * gap for index, (name, base) in enumerate(zip(names, bases, strict=True))}
