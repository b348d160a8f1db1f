"""Figures of a sweep: hits and time per token by capacity.

The input is the rows of :func:`expertcast.runtime.simulation.sweep.sweep`. Colours are those of Okabe and Ito, which
colour-blind readers can distinguish. A set of policies has the same colour, marker and line in every figure.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from expertcast.predictors.messages import Json

Rows = Sequence[Json]


_COLOURS = ("#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#A89600", "#D55E00")
_STYLES = cycler(linestyle=("-", "--", "-.")) * cycler(color=_COLOURS, marker=("o", "s", "^", "D", "v", "P", "X"))
BOUNDS: dict[str, Json] = {"belady": {"color": "#222222", "linestyle": "-"}}
_NAMES = ("prefetch", "predictor", "miss", "routing", "pre_eviction", "scope")


def labelled(results: Rows) -> list[Json]:
    """Add `label` and `style` to each row.

    The label is the eviction policy and all settings that differ; the style has keyword arguments of `plot`.
    """
    others = [row for row in results if row["eviction"] not in BOUNDS]
    differing = [name for name in _NAMES if len({row.get(name) for row in others}) > 1]
    unused, styles = _STYLES(), dict[str, Json]()
    rows = []
    for row in results:
        bound = row["eviction"] in BOUNDS
        names = ["scope"] if bound and "scope" in differing else [] if bound else differing
        label = ", ".join([row["eviction"], *(str(row[name]) for name in names if row.get(name) is not None)])
        if label not in styles:
            styles[label] = BOUNDS.get(row["eviction"]) or next(unused)
        rows.append({**row, "label": label, "style": styles[label]})
    return rows


_LEGEND_WIDTH, _LINE_INCHES = 30, 0.18
_TICK_GAP = 0.1
"""Minimum distance of horizontal tick labels, as a share of the axis; closer labels are rotated."""


def write_figures(results: Rows, folder: Path) -> list[Path]:
    """Write the figures of a sweep as PNG files.

    Args:
        results: rows of a sweep.
        folder: existing folder for the files.

    Returns:
        Paths of the files.
    """
    drawn = {"hit_rate": hit_rates(results), "tpot": token_times(results)}
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
    """Draw the hit rate by capacity at the first bandwidth, with Belady's bound."""
    rows = _first_bandwidth(labelled(results))
    figure, (axis,) = panels(1)
    _lines(axis, rows, "hit_rate", 1.0)
    axis.set(ylabel="hit rate in decode steps", ylim=(-0.02, 1.02))
    return _legend(figure, rows)


def token_times(results: Rows) -> Figure:
    """Draw the median time per token by capacity, one panel per bandwidth."""
    rows = labelled(results)
    bandwidths = _distinct(rows, "bandwidth")
    figure, axes = panels(len(bandwidths))
    for axis, bandwidth in zip(axes, bandwidths, strict=True):
        _lines(axis, [row for row in rows if row["bandwidth"] == bandwidth], "tpot_s", 1e3)
        axis.set_title(f"{bandwidth / 1e9:.3g} GB/s", fontsize=10)
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel("time per token (ms, median)")
    return _legend(figure, rows)


def _lines(axis: Axes, rows: Rows, key: str, unit: float) -> None:
    """Draw one line per label by capacity."""
    for label, style in _styles(rows).items():
        points = sorted((row["capacity"], unit * row[key]) for row in rows if row["label"] == label)
        xs, ys = zip(*points, strict=True)
        axis.plot(xs, ys, **style)
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
    handles = [Line2D([], [], label=label, **style) for label, style in styles.items()]
    lines = sum(label.count("\n") + 1 for label in styles)
    figure.set_figheight(max(figure.get_figheight(), 0.4 + _LINE_INCHES * lines))
    figure.legend(handles=handles, loc="outside right center", fontsize=8, frameon=False)
    return figure


def _styles(rows: Rows) -> dict[str, Json]:
    return {row["label"]: row["style"] for row in rows}


def _first_bandwidth(rows: list[Json]) -> list[Json]:
    return [row for row in rows if row["bandwidth"] == rows[0]["bandwidth"]]


def _distinct(rows: Rows, key: str) -> list[float]:
    return sorted({row[key] for row in rows})


def _plain(axis: Axes) -> None:
    """Remove the frame and add a light grid."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="#DDDDDD", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=8)
