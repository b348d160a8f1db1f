"""The study's figures: those of :mod:`expertcast.runtime.simulation.figures` for chosen rows, and the frontier of lossy
policies by what each costs in quality (Fig. 7 of SpecMD)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.study.study import FORECAST, LITERAL, SHARED
from expertcast.runtime.simulation.figures import collisions, frontier, hit_rates, panels, save, token_times

COLLIDING = ("lru", "lfu", "fld", "score", "least_stale", LITERAL, FORECAST)
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#767676")
_MARKERS = ("o", "s", "^", "D", "P", "X", "v")
_LEAST_KL = 1e-5
"""Where the axis of the divergence begins: the exact model lies on its edge."""

Row = Mapping[str, Any]


def write_figures(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write what the rows have something for."""
    rows = result["results"]
    drawn = {
        "policies-hit-rate": hit_rates([row for row in rows if row["stage"] == "eviction" and _shown(row)]),
        "policies-tpot": token_times(_prefetching(rows)),
        "policies-collisions": collisions(colliding(rows)),
    }
    measured = [row for row in rows if row["stage"] == "lossy" and row["kl"] is not None]
    if measured:
        drawn["policies-pareto"] = pareto(measured)
    return save(drawn, folder)


def pareto(rows: Sequence[Row]) -> Figure:
    """Divergence from the exact model against time per token, a panel per capacity: a colour per miss policy, a marker
    per routing, and a line through what nothing beats in both."""
    shares = sorted({row["share"] for row in rows})
    misses = list(dict.fromkeys(row["miss"] for row in rows))
    routings = list(dict.fromkeys(row["routing"] for row in rows))
    figure, axes = panels(len(shares))
    for axis, share in zip(axes, shares, strict=True):
        own = [row for row in rows if row["share"] == share]
        for row in own:
            colour, marker = _COLOURS[misses.index(row["miss"])], _MARKERS[routings.index(row["routing"])]
            axis.plot(*_point(row), color=colour, marker=marker, markersize=7, linestyle="")
        best = frontier([(-row["tpot_mean_s"], row["kl"]) for row in own])
        line = [(-1e3 * speed, max(loss, _LEAST_KL)) for speed, loss in best]
        axis.plot(*zip(*line, strict=True), color="#767676", lw=0.9, ls="--", zorder=0)
        axis.set(yscale="log", title=f"{share:.0%} of experts", xlabel="time per token (ms, mean)")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#DDDDDD", linewidth=0.6)
    axes[0].set_ylabel("KL from the exact model (nats per token)")
    figure.legend(handles=_legend(misses, routings), loc="outside right center", fontsize=8, frameon=False)
    return figure


def _point(row: Row) -> tuple[float, float]:
    return 1e3 * row["tpot_mean_s"], max(row["kl"], _LEAST_KL)


def _legend(misses: Sequence[str], routings: Sequence[str]) -> list[Line2D]:
    colours = zip(misses, _COLOURS, strict=False)
    markers = zip(routings, _MARKERS, strict=False)
    return [
        *(Line2D([], [], color=colour, marker="o", linestyle="", label=name) for name, colour in colours),
        *(Line2D([], [], color="#222222", marker=marker, linestyle="", label=name) for name, marker in markers),
    ]


def _shown(row: Row) -> bool:
    """lhu is lfu where nothing comes in a lower precision; belady bounds policies that load on demand only."""
    return bool(row["scope"] == "global" and row["eviction"] not in ("lhu", FORECAST))


def _prefetching(rows: Sequence[Row]) -> list[Row]:
    """Time per token of the evictions that matter, prefetched by the two usual selections and not."""
    return [
        row
        for row in rows
        if row["stage"] == "prefetch"
        and row["predictor"] in (None, SHARED)
        and row["eviction"] in ("lru", "least_stale", FORECAST)
        and row["prefetch"] in ("none", "top_k", "value")
        and (row["eviction"], row["prefetch"]) != ("lru", "value")
        and row["share"] in {each["share"] for each in rows if each["stage"] == "lossy"}
    ]


def colliding(rows: Sequence[Row]) -> list[Row]:
    """Collisions where the papers count them: prefetched by top-k."""
    return [
        row
        for row in rows
        if row["stage"] == "prefetch"
        and row["predictor"] == SHARED
        and row["prefetch"] == "top_k"
        and row["eviction"] in COLLIDING
        and row["ratio"] == min(each["ratio"] for each in rows)
    ]
