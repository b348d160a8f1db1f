"""Figures of a sweep: hits and time per token by capacity.

The input is the rows of :func:`expertcast.runtime.simulation.sweep.sweep`. Colours are those of Okabe and Ito, which
colour-blind readers can distinguish. A set of policies has the same colour, marker and line in every figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cycler import cycler
from matplotlib.figure import Figure

from expertcast.predictors.messages import Json

Rows = Sequence[Json]


_COLOURS = ("#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#A89600", "#D55E00")
_STYLES = cycler(linestyle=("-", "--", "-.")) * cycler(color=_COLOURS, marker=("o", "s", "^", "D", "v", "P", "X"))
BOUNDS: dict[str, Json] = {"belady": {"color": "#222222", "linestyle": "-", "marker": ""}}
_NAMES = ("prefetch", "predictor", "miss", "routing", "pre_eviction", "scope")
_LINE_INCHES = 0.18


def labelled(results: Rows) -> list[Json]:
    """Add `label` to each row: the eviction policy, and all settings in which other rows differ."""
    others = [row for row in results if row["eviction"] not in BOUNDS]
    differing = [name for name in _NAMES if len({row.get(name) for row in others}) > 1]
    rows = []
    for row in results:
        names = [name for name in differing if name == "scope" or row["eviction"] not in BOUNDS]
        own = [str(row[name]) for name in names if row.get(name) is not None]
        rows.append({**row, "label": ", ".join([row["eviction"], *own])})
    return rows


def write_figures(results: Rows, folder: Path) -> list[Path]:
    """Write the figures of a sweep as PNG files.

    Args:
        results: rows of a sweep.
        folder: existing folder for the files.

    Returns:
        Paths of the files.
    """
    drawn = {"hit_rate": hit_rates(results), "tpot": lines(results, "tpot_s", "time per token (ms, median)", unit=1e3)}
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
    first = [row for row in results if row["bandwidth"] == results[0]["bandwidth"]]
    return lines(first, "hit_rate", "hit rate in decode steps", most=1.02)


def lines(results: Rows, key: str, name: str, *, unit: float = 1.0, most: float | None = None) -> Figure:
    """Draw `unit` times a value of the rows by capacity, one panel per bandwidth and one line per label.

    Args:
        results: rows of a sweep.
        key: name of the value in a row.
        name: name of the vertical axis.
        unit: factor of the value.
        most: upper end of the vertical axis.
    """
    rows = labelled(results)
    styles = {row["label"]: BOUNDS.get(row["eviction"], {}) for row in rows}
    bandwidths, shares = (sorted({row[each] for row in rows}) for each in ("bandwidth", "capacity"))
    height = max(4.4, 0.4 + _LINE_INCHES * len(styles))
    figure = Figure(figsize=(2.8 + 4.2 * len(bandwidths), height), layout="constrained")
    axes = figure.subplots(1, len(bandwidths), squeeze=False)[0]
    for axis, bandwidth in zip(axes, bandwidths, strict=True):
        axis.set_prop_cycle(_STYLES)
        for label, style in styles.items():
            own = [row for row in rows if row["bandwidth"] == bandwidth and row["label"] == label]
            points = sorted((row["capacity"], unit * row[key]) for row in own)
            axis.plot(*zip(*points, strict=True), label=label, **style)
        axis.set(xscale="log", xlabel="experts that fit (share of all, log scale)", ylim=(0, most))
        axis.set_title(f"{bandwidth / 1e9:.3g} GB/s", fontsize=10)
        axis.set_xticks(shares, [f"{share:.1%}" for share in shares], rotation=90, fontsize=8)
        axis.minorticks_off()
        axis.grid(color="#DDDDDD", linewidth=0.6)
    axes[0].set_ylabel(name)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=8, frameon=False)
    return figure
