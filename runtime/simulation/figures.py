"""Figures of a sweep: hits and time per token by capacity, collisions per layer, quality against speed.

The input is the rows of :func:`expertcast.runtime.simulation.sweep.sweep`. Colours are those of Okabe and Ito, which
colour-blind readers can distinguish. A set of policies has the same colour and marker in every figure; `forecast` has
the widest line. Policies with the same line are drawn once, and the legend names all of them.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from expertcast.predictors.messages import Json

Rows = Sequence[Json]


class Style(NamedTuple):
    """Line and marker of a set of policies."""

    colour: str
    marker: str
    line: str = "-"
    width: float = 1.5
    size: float = 5.0
    order: float = 2.0
    """Drawing order: higher values are drawn on top."""

    def drawn(self, scale: float = 1.0) -> Json:
        """Return the keyword arguments for matplotlib's `plot`, with scaled lines and markers."""
        return {
            "color": self.colour, "marker": self.marker, "linestyle": self.line, "linewidth": scale * self.width,
            "markersize": scale * self.size, "zorder": self.order,
        }  # fmt: skip


GREY = "#767676"
_COLOURS = ("#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#A89600", GREY)
_LINES = ("-", "--", "-.")
"""Line styles; the next one is used when all colours are used."""
_WIDTHS = ((2.4, 7.5, 2.1), (1.8, 5.5, 2.2), (1.2, 4.0, 2.3))
"""Line width, marker size and drawing order, used in turns: thin lines are drawn over wide ones."""
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")
BOUNDS = {"belady": Style("#222222", ""), "belady_bypass": Style("#222222", "", ":")}
_FORECAST = "forecast"
_FORECAST_COLOUR = "#D55E00"
_FORECAST_MARKERS = ("*", "d", "8", "H")
_INVISIBLE = 0.002
"""Maximum distance of lines that look the same, as a share of the range of the axis."""
_NAMES = ("prefetch", "predictor", "miss", "routing", "pre_eviction", "scope")


def labelled(results: Rows) -> list[Json]:
    """Add `label` and `style` to each row; the label is the eviction policy and all settings that differ."""
    others = [row for row in results if row["eviction"] not in BOUNDS]
    differing = [name for name in _NAMES if len({row.get(name) for row in others}) > 1]
    styles: dict[str, Style] = {}
    rows = []
    for row in results:
        bound = row["eviction"] in BOUNDS
        names = ["scope"] if bound and "scope" in differing else [] if bound else differing
        label = ", ".join([row["eviction"], *(str(row[name]) for name in names if row.get(name) is not None)])
        if label not in styles:
            forecast = row["eviction"].partition(":")[0] == _FORECAST  # with options or without
            styles[label] = BOUNDS.get(row["eviction"]) or _style(forecast, styles.values())
        rows.append({**row, "label": label, "style": styles[label]})
    return rows


def _style(forecast: bool, taken: Iterable[Style]) -> Style:
    """Return a style that differs from those in `taken`."""
    before = sum((style.colour == _FORECAST_COLOUR) == forecast and bool(style.marker) for style in taken)
    if forecast:
        line = _LINES[before % len(_LINES)]
        return Style(_FORECAST_COLOUR, _FORECAST_MARKERS[before % len(_FORECAST_MARKERS)], line, 3.4, 11.0, 3.0)
    line = _LINES[before // len(_COLOURS) % len(_LINES)]
    return Style(
        _COLOURS[before % len(_COLOURS)], _MARKERS[before % len(_MARKERS)], line, *_WIDTHS[before % len(_WIDTHS)]
    )


def one_line_each(rows: Rows, value: Callable[[Json], Sequence[float]]) -> list[Json]:
    """Merge labels whose lines look the same; bounds keep their own lines.

    One label's rows stay (those of `forecast` if present), and their new label names all: `lfu = lhu` for equal values,
    `lfu ≈ lhu` for values that differ invisibly.

    Args:
        rows: rows with labels.
        value: returns the numbers that are drawn for a row.
    """
    series: dict[str, dict[tuple[float, float], Sequence[float]]] = {}
    for row in rows:
        series.setdefault(row["label"], {})[row["capacity"], row["bandwidth"]] = value(row)
    every = [number for points in series.values() for numbers in points.values() for number in numbers]
    unseen = _INVISIBLE * (max(every, default=0.0) - min(every, default=0.0))
    bounds = {row["label"] for row in rows if row["eviction"] in BOUNDS}
    groups: list[list[str]] = []
    for label in series:
        near = (group for group in groups if not {label, group[0]} & bounds)
        own = next((group for group in near if _farthest(series[label], series[group[0]]) <= unseen), None)
        groups.append([label]) if own is None else own.append(label)
    kept: dict[str, str] = {}
    for group in groups:
        exact = all(series[label] == series[group[0]] for label in group)
        first = max(group, key=lambda label: label.startswith(_FORECAST))
        kept[first] = (" = " if exact else " ≈ ").join([first, *(label for label in group if label != first)])
    return [{**row, "label": kept[row["label"]]} for row in rows if row["label"] in kept]


def _farthest(
    one: Mapping[tuple[float, float], Sequence[float]], other: Mapping[tuple[float, float], Sequence[float]]
) -> float:
    """Return the maximum distance of two lines; infinity if they have different points."""
    if one.keys() != other.keys():
        return math.inf
    return max(abs(a - b) for place in one for a, b in zip(one[place], other[place], strict=True))


_LEGEND_WIDTH, _LINE_INCHES = 30, 0.18
_TICK_GAP = 0.1
"""Minimum distance of horizontal tick labels, as a share of the axis; closer labels are rotated."""
_EXACT = {"miss": "fetch", "routing": "standard"}


def write_figures(results: Rows, folder: Path) -> list[Path]:
    """Write the figures of a sweep as PNG files.

    Args:
        results: rows of a sweep.
        folder: existing folder for the files.

    Returns:
        Paths of the files: hits, times and collisions, and quality against speed if the rows have a perplexity.
    """
    drawn = {"hit_rate": hit_rates(results), "tpot": token_times(results), "collisions": collisions(results)}
    if any(row.get("perplexity") is not None for row in results):
        drawn["pareto"] = pareto(results)
    for name, figure in drawn.items():
        figure.savefig(folder / f"{name}.png", dpi=130)
    return [folder / f"{name}.png" for name in drawn]


def write_hits(results: Rows, folder: Path) -> Path:
    """Write the hits of a replayed routing file as a PNG file, as :func:`write_figures` does.

    Args:
        results: rows with `policy`, `scope`, `capacity`, `bandwidth` and `hits`.
        folder: existing folder for the file.
    """
    rows = [{**row, "eviction": row["policy"], "hit_rate": row["hits"]} for row in results]
    hit_rates(rows).savefig(folder / "hit_rate.png", dpi=130)
    return folder / "hit_rate.png"


def hit_rates(results: Rows) -> Figure:
    """Draw the hit rate by capacity at the first bandwidth, with Belady's bounds."""
    rows = one_line_each(_first_bandwidth(labelled(results)), lambda row: [row["hit_rate"]])
    figure, (axis,) = panels(1)
    _lines(axis, rows, "hit_rate", 1.0)
    axis.set(ylabel="hit rate in decode steps", ylim=(-0.02, 1.02))
    return _legend(figure, rows)


def token_times(results: Rows) -> Figure:
    """Draw the median time per token by capacity, one panel per bandwidth."""
    rows = one_line_each(labelled(results), lambda row: [row["tpot_s"]])
    bandwidths = _distinct(rows, "bandwidth")
    figure, axes = panels(len(bandwidths))
    for axis, bandwidth in zip(axes, bandwidths, strict=True):
        _lines(axis, [row for row in rows if row["bandwidth"] == bandwidth], "tpot_s", 1e3)
        axis.set_title(f"{bandwidth / 1e9:.3g} GB/s", fontsize=10)
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel("time per token (ms, median)")
    return _legend(figure, rows)


def collisions(results: Rows) -> Figure:
    """Draw the misses of experts evicted in the same step, by layer (SpecMD, Fig. 5 and 9).

    There is one column per capacity; rates are relative to requests in the upper row and to misses in the lower one.
    """
    shares = ("collision_rate", "collision_share")
    rows = one_line_each(
        _without_bounds(_first_bandwidth(labelled(results))),
        lambda row: [value or 0.0 for key in shares for value in row["per_layer"][key]],
    )
    capacities = _distinct(rows, "capacity")
    figure = Figure(figsize=(2.8 + 2.9 * max(1, len(capacities)), 6.2), layout="constrained")
    axes = figure.subplots(2, max(1, len(capacities)), squeeze=False, sharex=True, sharey="row")
    for column, capacity in zip(axes.T, capacities, strict=False):
        for axis, key in zip(column, shares, strict=True):
            for row in (row for row in rows if row["capacity"] == capacity):
                values = [100 * (value or 0.0) for value in row["per_layer"][key]]
                axis.plot(range(len(values)), values, **row["style"].drawn(0.75))
            _plain(axis)
        column[0].set_title(f"{capacity:.1%} of experts", fontsize=10)
        column[1].set_xlabel("MoE layer")
    axes[0, 0].set_ylabel("collisions (% of accesses)")
    axes[1, 0].set_ylabel("collisions (% of misses)")
    return _legend(figure, rows)


def pareto(results: Rows) -> Figure:
    """Draw perplexity against speed relative to loading every miss, one panel per capacity (SpecMD, Fig. 7).

    A line joins the points of the Pareto frontier.
    """
    rows = _without_bounds(_first_bandwidth(labelled(results)))
    rows = [row for row in rows if row["perplexity"] is not None]
    best = {key: min(row[key] for row in rows) for key in ("tpot_s", "perplexity")}
    rows = one_line_each(rows, lambda row: [row[key] / least for key, least in best.items()])
    capacities = _distinct(rows, "capacity")
    figure, axes = panels(len(capacities))
    for axis, capacity in zip(axes, capacities, strict=True):
        own = [row for row in rows if row["capacity"] == capacity]
        exact = [row["tpot_s"] for row in own if all(row[key] == plain for key, plain in _EXACT.items())]
        base_s = min(exact, default=max(row["tpot_s"] for row in own))
        points = [(base_s / row["tpot_s"], row["perplexity"]) for row in own]
        for row, point in zip(own, points, strict=True):
            axis.plot(*point, **row["style"].drawn(1.4) | {"linestyle": ""})
        axis.plot(*zip(*frontier(points), strict=True), color=GREY, linewidth=0.9, linestyle="--", zorder=0)
        axis.set_title(f"{capacity:.1%} of experts", fontsize=10)
        axis.set_xlabel("speed (x fetching every miss)")
        _plain(axis)
    axes[0].set_ylabel("perplexity (lower is better)")
    return _legend(figure, rows)


def frontier(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the (speed, perplexity) points of the Pareto frontier by falling speed."""
    best: list[tuple[float, float]] = []
    for speed, perplexity in sorted(set(points), key=lambda point: (-point[0], point[1])):
        if not best or perplexity < best[-1][1]:
            best.append((speed, perplexity))
    return best


def _lines(axis: Axes, rows: Rows, key: str, unit: float) -> None:
    """Draw one line per label by capacity."""
    for label, style in _styles(rows).items():
        points = sorted((row["capacity"], unit * row[key]) for row in rows if row["label"] == label)
        xs, ys = zip(*points, strict=True)
        axis.plot(xs, ys, **style.drawn())
    shares = _distinct(rows, "capacity")
    axis.set_xscale("log")
    least = _TICK_GAP * math.log(shares[-1] / shares[0]) if len(shares) > 1 else 0.0
    crowded = any(math.log(right / left) < least for left, right in pairwise(shares))
    axis.set_xticks(shares, [f"{share:.1%}" for share in shares], rotation=90 if crowded else 0)
    axis.minorticks_off()
    axis.set_xlabel("experts that fit (share of all, log scale)")
    _plain(axis)


def panels(count: int) -> tuple[Figure, list[Axes]]:
    """Return a figure with `count` axes side by side and space for a legend."""
    figure = Figure(figsize=(2.8 + 4.2 * max(1, count), 4.4), layout="constrained")
    return figure, list(figure.subplots(1, max(1, count), squeeze=False)[0])


def _legend(figure: Figure, rows: Rows) -> Figure:
    styles = {textwrap.fill(label, _LEGEND_WIDTH): style for label, style in _styles(rows).items()}
    handles = [Line2D([], [], label=label, **style.drawn()) for label, style in styles.items()]
    lines = sum(label.count("\n") + 1 for label in styles)
    figure.set_figheight(max(figure.get_figheight(), 0.4 + _LINE_INCHES * lines))
    figure.legend(handles=handles, loc="outside right center", fontsize=8, frameon=False)
    return figure


def _styles(rows: Rows) -> dict[str, Style]:
    return {row["label"]: row["style"] for row in rows}


def _first_bandwidth(rows: list[Json]) -> list[Json]:
    return [row for row in rows if row["bandwidth"] == rows[0]["bandwidth"]]


def _without_bounds(rows: list[Json]) -> list[Json]:
    return [row for row in rows if row["eviction"] not in BOUNDS]


def _distinct(rows: Rows, key: str) -> list[float]:
    return sorted({row[key] for row in rows})


def _plain(axis: Axes) -> None:
    """Remove the frame and add a light grid."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="#DDDDDD", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=8)
