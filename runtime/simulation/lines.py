"""The lines of a sweep's figures: what each is called, how it is drawn, and which are one to the eye."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from expertcast.predictors.plain import Json

Rows = Sequence[Json]


class Style(NamedTuple):
    """How a set of policies is drawn."""

    colour: str
    marker: str
    line: str = "-"
    width: float = 1.5
    size: float = 5.0
    order: float = 2.0
    """What has more is drawn over what has less."""

    def drawn(self, scale: float = 1.0) -> Json:
        """The same for matplotlib's `plot`, lines and markers scaled."""
        return {
            "color": self.colour, "marker": self.marker, "linestyle": self.line, "linewidth": scale * self.width,
            "markersize": scale * self.size, "zorder": self.order,
        }  # fmt: skip


GREY = "#767676"
_COLOURS = ("#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#A89600", GREY)
_LINES = ("-", "--", "-.")
"""Of the first policies, of those for whom the colours begin anew, and so on."""
_WIDTHS = ((2.4, 7.5, 2.1), (1.8, 5.5, 2.2), (1.2, 4.0, 2.3))
"""Width, size of markers and order, in turns: where lines meet for a part of their way, the thin lies on the wide."""
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")
BOUNDS = {"belady": Style("#222222", ""), "belady_bypass": Style("#222222", "", ":")}
_FORECAST = "forecast"
_FORECAST_COLOUR = "#D55E00"
_FORECAST_MARKERS = ("*", "d", "8", "H")
_UNSEEN = 0.002
"""Of what an axis reaches over: lines that are nowhere farther apart are one to the eye."""
_NAMES = ("prefetch", "predictor", "miss", "routing", "pre_eviction", "scope")


def labelled(results: Rows) -> list[Json]:
    """The rows with `label`, the eviction policy and whatever else differs among the rows, and its `style`."""
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
    """One of its own, beside those that are taken."""
    before = sum((style.colour == _FORECAST_COLOUR) == forecast and bool(style.marker) for style in taken)
    if forecast:
        line = _LINES[before % len(_LINES)]
        return Style(_FORECAST_COLOUR, _FORECAST_MARKERS[before % len(_FORECAST_MARKERS)], line, 3.4, 11.0, 3.0)
    line = _LINES[before // len(_COLOURS) % len(_LINES)]
    return Style(
        _COLOURS[before % len(_COLOURS)], _MARKERS[before % len(_MARKERS)], line, *_WIDTHS[before % len(_WIDTHS)]
    )


def one_line_each(rows: Rows, value: Callable[[Json], Sequence[float]]) -> list[Json]:
    """The rows of labels whose lines lie apart. Of labels on one line, the rows of one of them stay (of `forecast` if
    it is among them), and their `label` names all: `lfu = lhu`, or `lfu ≈ lhu` where they differ by less than is seen.
    A bound keeps its own line.

    Args:
        rows: labelled.
        value: what is drawn of a row: so many numbers on one axis.
    """
    series: dict[str, dict[tuple[float, float], Sequence[float]]] = {}
    for row in rows:
        series.setdefault(row["label"], {})[row["capacity"], row["bandwidth"]] = value(row)
    every = [number for points in series.values() for numbers in points.values() for number in numbers]
    unseen = _UNSEEN * (max(every, default=0.0) - min(every, default=0.0))
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
    """The greatest distance of two lines; infinite where they are not of the same places."""
    if one.keys() != other.keys():
        return math.inf
    return max(abs(a - b) for place in one for a, b in zip(one[place], other[place], strict=True))
