"""Ratios, intervals and tables of :mod:`benchmarks.forecasts`, from the seconds of every turn.

A ratio divides the seconds of two sides over the same turns, so over the same tokens. Its interval holds 90% of the
ratios of 1,000 bootstrap samples of turns. The best fixed side is chosen on other repetitions than it is compared on,
and the ratios of all repetitions are averaged: the fastest of several noisy sides, chosen and compared on the same
turns, would look faster than it is, and a side keeps its place in memory for a repetition. In a single repetition it is
chosen on the even turns and compared on the odd ones, and the other way round.

S fixed sides, T turns, N ratios: the measured one, then those of bootstrap samples.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from expertcast.predictors.messages import Json

ON_DEMAND, AUTO = "on_demand", "auto"
TURN = 11
"""Decode steps of a turn; the first one is left out. No multiple of 8: the governor of forecasts tries other kinds of
steps after 8, 16, 32 ... steps, which would then all have cold caches."""
FIRST = 44
"""Steps that are also compared apart from the later ones: `auto` learns in them."""
_SAMPLES = 1000
_WIDE = 0.01
"""Half width of an interval above which `auto` may take 1.02 instead of 1.01 times as long as on demand."""
_WAITING = 0.1
"""Share of its time that the side on demand waits in a setting with waiting."""
_BOUNDED = (("2", 0.0), ("2", 0.25), ("5", 0.25))
"""Links and capacities whose ratio to the bound is a target."""

Turns = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of times with its 90% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"

    @classmethod
    def of(cls, ratios_N: NDArray[np.float64]) -> Ratio:
        """Return the first ratio, with the interval of the others, which are of bootstrap samples."""
        low, high = np.percentile(ratios_N[1:], (5, 95))
        return cls(float(ratios_N[0]), float(low), float(high))

    @property
    def half_width(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2


class Compared:
    """Sides of one setting, compared.

    Args:
        run: a setting's entry of the result file.
    """

    def __init__(self, run: Json) -> None:
        self.run = run
        self.seconds: dict[str, NDArray[np.float64]] = {
            name: np.array(side["seconds"]) for name, side in run["sides"].items()
        }
        """Seconds [T] by side."""
        self._fixed = [name for name in self.seconds if name != AUTO]
        self._turns = np.arange(len(self.seconds[AUTO]))
        repetition_T, turn_T = np.divmod(self._turns, len(self._turns) // run["repetitions"])
        self._part = turn_T % 2 if run["repetitions"] == 1 else repetition_T
        """Number [T] of the part that a turn belongs to: the best fixed side is chosen on the other parts."""
        learning_T = turn_T < FIRST // TURN
        self.first: Turns = self._turns[learning_T]
        """Turns of the first 44 steps of each repetition."""
        self.later: Turns = self._turns[~learning_T]
        """Turns after them."""

    def ms(self, name: str, key: str = "seconds") -> float:
        """Return the milliseconds of a step of a side; `key` "waited_s": of its waiting."""
        return float(1e3 * statistics.mean(self.run["sides"][name][key]) / (TURN - 1))

    @property
    def best(self) -> str:
        """Fastest fixed side over all turns."""
        return min(self._fixed, key=self.ms)

    @property
    def computing_ms(self) -> float:
        """Milliseconds of a step on demand without its waiting."""
        return self.ms(ON_DEMAND) - self.ms(ON_DEMAND, "waited_s")

    @property
    def bound_ms(self) -> float:
        """The larger of computing and of the time that the fewest bytes of a side take over the link."""
        bandwidth, least = self.run["bandwidth"], min(side["bytes"] for side in self.run["sides"].values())
        return max(self.computing_ms, 1e3 * least / bandwidth if bandwidth else 0.0)

    @property
    def waits(self) -> bool:
        """Whether the side on demand waits for a tenth of its time or more."""
        return self.ms(ON_DEMAND, "waited_s") >= _WAITING * self.ms(ON_DEMAND)

    def over(self, name: str, turns: Turns | None = None) -> Ratio | None:
        """Return the time of `auto` over that of a side; None without turns."""
        turns = self._turns if turns is None else turns
        if not len(turns):
            return None
        chosen_NT = _with_samples(turns, np.random.default_rng(0))
        return Ratio.of(self.seconds[AUTO][chosen_NT].sum(axis=1) / self.seconds[name][chosen_NT].sum(axis=1))

    def over_best(self, turns: Turns | None = None) -> Ratio | None:
        """Return the time of `auto` over that of the best fixed side, chosen on other turns; None without turns."""
        turns = self._turns if turns is None else turns
        if len(turns) < 2:
            return None
        generator, fixed_ST = np.random.default_rng(0), np.stack([self.seconds[name] for name in self._fixed])
        parts, ratios_N = np.unique(self._part), np.zeros(_SAMPLES + 1)
        for part in parts:
            choosing_NT = _with_samples(self._turns[self._part != part], generator)
            compared_NT = _with_samples(turns[self._part[turns] == part], generator)
            best_N = fixed_ST[:, choosing_NT].sum(axis=2).argmin(axis=0)
            best_s_N = fixed_ST[best_N[:, None], compared_NT].sum(axis=1)
            ratios_N += self.seconds[AUTO][compared_NT].sum(axis=1) / best_s_N / len(parts)
        return Ratio.of(ratios_N)


def _with_samples(turns: Turns, generator: np.random.Generator) -> Turns:
    """Return the turns, then bootstrap samples of them, [N, T]."""
    return np.vstack([turns, generator.choice(turns, (_SAMPLES, len(turns)))])


def page(values: Json) -> str:
    """Return the tables of a result file as Markdown, and a line for each target."""
    compared = [Compared(run) for run in values["runs"]]
    return "\n\n".join([times(compared), ratios(compared), waiting(compared), "\n".join(targets(compared))])


def times(compared: list[Compared]) -> str:
    """Milliseconds per step of each side, the best fixed one bold, and the bound."""
    names = list(compared[0].seconds)
    rows = []
    for each in compared:
        shown = {name: f"{each.ms(name):.1f}" for name in names}
        shown[each.best] = f"**{shown[each.best]}**"
        rows.append([*shown.values(), f"{each.bound_ms:.1f}"])
    return _table(compared, [*(name.replace("_", " ") if name == ON_DEMAND else name for name in names), "bound"], rows)


def ratios(compared: list[Compared]) -> str:
    """Time of `auto` over on demand and over the best fixed side: all steps, the first 44, the later ones."""
    columns = [
        f"auto / {other}{part}" for other in ("on demand", "best fixed") for part in ("", ", first 44", ", later")
    ]
    rows = []
    for each in compared:
        parts = (None, each.first, each.later)
        found = [each.over(ON_DEMAND, part) for part in parts] + [each.over_best(part) for part in parts]
        rows.append([str(ratio or "") for ratio in found] + [f"{each.ms(AUTO) / each.bound_ms:.2f}"])
    return _table(compared, [*columns, "auto / bound"], rows)


def waiting(compared: list[Compared]) -> str:
    """Milliseconds of waiting and hit rate of each side, and the computing of a step on demand."""
    names = list(compared[0].seconds)
    rows = []
    for each in compared:
        cells = [f"{each.ms(name, 'waited_s'):.1f}, {each.run['sides'][name]['hit_rate']:.2f}" for name in names]
        rows.append([*cells, f"{each.computing_ms:.1f}"])
    return _table(compared, [*(f"{name}: waited, hits" for name in names), "computing"], rows)


def _table(compared: list[Compared], columns: list[str], rows: list[list[str]]) -> str:
    head = ["link", "cached", "batch", "accuracy", *columns]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for each, row in zip(compared, rows, strict=True):
        lines.append(f"| {' | '.join([*_setting(each.run), *row])} |")
    return "\n".join(lines)


def _setting(run: Json) -> list[str]:
    return [run["link"], f"{run['capacity']:.0%}", str(run["batch"]), str(run["accuracy"] or "")]


def targets(compared: list[Compared]) -> list[str]:
    """Return a line for each target: settings that meet it, and those that miss it with their ratio."""
    parts: dict[str, Callable[[Compared], Turns | None]] = {
        "all steps": lambda each: None,
        "first 44": lambda each: each.first,
        "later": lambda each: each.later,
    }
    lines = [f"- tokens differ in {sum(not each.run['identical'] for each in compared)} of {len(compared)} settings"]
    for name, part in parts.items():
        demand = [each.over(ON_DEMAND, part(each)) for each in compared]
        limits = [1.02 if ratio is not None and ratio.half_width > _WIDE else 1.01 for ratio in demand]
        lines.append(f"- auto / on demand at most 1.01 (1.02 if wide), {name}: {_met(compared, demand, limits)}")
    for name, part in parts.items():
        best = [each.over_best(part(each)) for each in compared]
        for limit in (1.02, 1.05):
            lines.append(f"- auto / best fixed at most {limit}, {name}: {_met(compared, best, [limit] * len(best))}")
    for each in compared:
        run = each.run
        if (run["link"], run["capacity"]) in _BOUNDED and run["batch"] == 1:
            lines.append(f"- auto / bound, {_label(run)}: {each.ms(AUTO) / each.bound_ms:.2f}")
    cheap = [ratio.value for each in compared if each.waits and (ratio := _over_cheapest(each)) is not None]
    if cheap:
        found = f"{statistics.median(cheap):.3f}, the median of {len(cheap)} settings with waiting"
        lines.append(f"- auto / quasi_hidden: {found}")
    return lines


def _over_cheapest(each: Compared) -> Ratio | None:
    return each.over("quasi_hidden") if "quasi_hidden" in each.seconds else None


def _met(compared: list[Compared], found: list[Ratio | None], limits: list[float]) -> str:
    judged = [
        (ratio, limit, each.run)
        for each, ratio, limit in zip(compared, found, limits, strict=True)
        if ratio is not None
    ]
    missed = [f"{_label(run)}: {ratio}" for ratio, limit, run in judged if ratio.value > limit]
    end = f"; missed by {'; '.join(missed)}" if missed else ""
    return f"{len(judged) - len(missed)} of {len(judged)} settings{end}"


def _label(run: Json) -> str:
    link, cached, batch, accuracy = _setting(run)
    words = [link if link.startswith("disk") else f"R {link}", cached]
    words += [f"batch {batch}"] if batch != "1" else []
    words += [f"accuracy {accuracy}"] if accuracy else []
    return " ".join(words)
