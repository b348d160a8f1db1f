"""Figures of a sweep: hits and time per token against capacity, collisions per layer, quality against speed.

They read the rows that :func:`expertcast.runtime.simulation.sweep.sweep` gives. Colours are Okabe and Ito's, which stay
apart for colour-blind readers; a set of policies has the same colour and marker in every figure, and `forecast` the
widest line. Policies whose lines would lie on each other are one, and the legend names them all.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from expertcast.predictors.plain import Json
from expertcast.runtime.simulation.lines import BOUNDS, GREY, Rows, Style, labelled, one_line_each

_LEGEND_WIDTH, _LINE_INCHES = 30, 0.18
_TICK_GAP = 0.1
"""Of the axis: numbers on it that are closer are turned, so that they do not overlap."""
_EXACT = {"miss": "fetch", "routing": "standard"}


def write_figures(results: Rows, folder: Path) -> list[Path]:
    """Write the figures that the rows have something for; returns their paths."""
    drawn = {"hit_rate": hit_rates(results), "tpot": token_times(results), "collisions": collisions(results)}
    if any(row.get("perplexity") is not None for row in results):
        drawn["pareto"] = pareto(results)
    return save(drawn, folder)


def save(drawn: Mapping[str, Figure], folder: Path) -> list[Path]:
    """Write figures as files of their names; returns their paths."""
    for name, figure in drawn.items():
        figure.savefig(folder / f"{name}.png", dpi=130)
    return [folder / f"{name}.png" for name in drawn]


def hit_rates(results: Rows) -> Figure:
    """Hits against capacity at the first bandwidth, Belady's bounds on top."""
    rows = one_line_each(_first_bandwidth(labelled(results)), lambda row: [row["hit_rate"]])
    figure, (axis,) = panels(1)
    _lines(axis, rows, "hit_rate", 1.0)
    axis.set(ylabel="hit rate in decode steps", ylim=(-0.02, 1.02))
    return _legend(figure, rows)


def token_times(results: Rows) -> Figure:
    """Median time per token against capacity, a panel per bandwidth."""
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
    """Misses of experts evicted earlier in the same pass, per layer: a column per capacity, over all accesses above and
    over misses below (Fig. 5 and 9 of SpecMD; trap 8 of the definitions)."""
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
    """Perplexity against speed relative to fetching every miss, a panel per capacity; the line joins what nothing beats
    in both (Fig. 7 of SpecMD)."""
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
    """(speed, perplexity) points that no other is at least as fast and as good as, by falling speed."""
    best: list[tuple[float, float]] = []
    for speed, perplexity in sorted(set(points), key=lambda point: (-point[0], point[1])):
        if not best or perplexity < best[-1][1]:
            best.append((speed, perplexity))
    return best


def _lines(axis: Axes, rows: Rows, key: str, unit: float) -> None:
    """A line per label over capacity."""
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
    """A figure with so many axes side by side, and room for a legend."""
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
    """No box, a light grid."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="#DDDDDD", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=8)
