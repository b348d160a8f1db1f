"""The roofline of speculation: tokens per second over tokens per byte of synchronous I/O (rows C3 and C6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from expertcast.predictors.plain import Json

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_FARTHEST = 4.0
"""Lengths whose copies are all hidden stand so much to the right of those that wait."""


def draw(rooflines: Mapping[str, Sequence[Json]], bandwidth: float, path: Path) -> bool:
    """A panel per name: its lengths as a line from a plain step on, the slope of the link, each length's compute roof
    as a tick above it; the fastest is ringed. False where there is nothing to draw.

    Args:
        rooflines: by name, points as `RooflinePoint.as_dict` gives them.
        bandwidth: of the link, bytes per second.
        path: of the picture.
    """
    if not rooflines:
        return False
    figure = Figure(figsize=(4.2 * len(rooflines) + 0.6, 3.8), layout="constrained")
    panels = figure.subplots(1, len(rooflines), sharey=True, squeeze=False)[0]
    for number, (panel, (name, points)) in enumerate(zip(panels, rooflines.items(), strict=True)):
        _panel(panel, points, bandwidth, _COLOURS[number % len(_COLOURS)])
        panel.set_title(name, fontsize=9)
    drawn = [point for points in rooflines.values() for point in points]
    lowest, highest = min(point["rate"] for point in drawn), max(point["compute_roof"] for point in drawn)
    panels[0].set_ylim(0.6 * lowest, 1.4 * highest)
    panels[0].set_ylabel("tokens per second")
    panels[0].legend(fontsize=7, loc="lower right")
    figure.savefig(path, dpi=110)
    return True


def _panel(panel: Axes, points: Sequence[Json], bandwidth: float, colour: str) -> None:
    known = [point["intensity"] for point in points if point["intensity"]]
    beyond = _FARTHEST * max(known, default=max(point["rate"] for point in points) / bandwidth)
    xs = [(point["intensity"] or beyond) * 1e6 for point in points]
    rates = [point["rate"] for point in points]
    roofs = [point["compute_roof"] for point in points]
    slope_x = [0.5 * min(xs), 1.5 * max(xs)]
    panel.plot(slope_x, [x * bandwidth / 1e6 for x in slope_x], color="#767676", label="all time for copies")
    panel.plot(xs, roofs, color=colour, marker="_", markersize=14, linestyle="none", label="all copies hidden")
    panel.vlines(xs, rates, roofs, color=colour, linewidth=0.6, linestyle="dotted")
    panel.plot(xs, rates, color=colour, marker="o", markersize=4, label="drafts of n tokens")
    best = max(range(len(points)), key=rates.__getitem__)
    panel.plot(xs[best], rates[best], marker="o", markersize=11, markerfacecolor="none", color=colour)
    for point, x, rate in zip(points, xs, rates, strict=True):
        panel.annotate(str(point["length"]), (x, rate), textcoords="offset points", xytext=(5, -9), fontsize=7)
    panel.set(xscale="log", yscale="log", xlabel="tokens per MB waited for")
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(color="#DDDDDD", linewidth=0.6)
