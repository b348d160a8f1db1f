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
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.results import markdown
from expertcast.predictors.messages import Json

ON_DEMAND, AUTO = "on_demand", "auto"
UNTRAINED = (ON_DEMAND, "quasi_hidden", "early_attention")
"""Sides whose forecasts need no training."""
TURN = 11
"""Decode steps of a turn; the first one is left out. No multiple of 8: the governor of forecasts tries other kinds of
steps after 8, 16, 32 ... steps, which would then all have cold caches."""
_SAMPLES = 1000

Turns = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of times with its 90% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}-{self.high:.2f})"

    @classmethod
    def of(cls, ratios_N: NDArray[np.float64]) -> Ratio:
        """Return the first ratio, with the interval of the others, which are of bootstrap samples."""
        low, high = np.percentile(ratios_N[1:], (5, 95))
        return cls(float(ratios_N[0]), float(low), float(high))


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

    def over(self, name: str) -> Ratio:
        """Return the time of `auto` over that of a side."""
        chosen_NT = _with_samples(self._turns, np.random.default_rng(0))
        return Ratio.of(self.seconds[AUTO][chosen_NT].sum(axis=1) / self.seconds[name][chosen_NT].sum(axis=1))

    def over_best(self, names: Sequence[str] = ()) -> Ratio:
        """Return the time of `auto` over that of the best of some fixed sides (default: all), chosen on other turns."""
        fixed = [name for name in self._fixed if name in (names or self._fixed)]
        generator, fixed_ST = np.random.default_rng(0), np.stack([self.seconds[name] for name in fixed])
        parts, ratios_N = np.unique(self._part), np.zeros(_SAMPLES + 1)
        for part in parts:
            choosing_NT = _with_samples(self._turns[self._part != part], generator)
            compared_NT = _with_samples(self._turns[self._part == part], generator)
            best_N = fixed_ST[:, choosing_NT].sum(axis=2).argmin(axis=0)
            best_s_N = fixed_ST[best_N[:, None], compared_NT].sum(axis=1)
            ratios_N += self.seconds[AUTO][compared_NT].sum(axis=1) / best_s_N / len(parts)
        return Ratio.of(ratios_N)


def _with_samples(turns: Turns, generator: np.random.Generator) -> Turns:
    """Return the turns, then bootstrap samples of them, [N, T]."""
    return np.vstack([turns, generator.choice(turns, (_SAMPLES, len(turns)))])


def page(values: Json) -> str:
    """Return the table of a result file as Markdown: milliseconds per step of each side, the best fixed one bold, the
    bound, and the time of `auto` over on demand and over the best fixed side."""
    compared = [Compared(run) for run in values["runs"]]
    names = list(compared[0].seconds)
    rows = []
    for each in compared:
        run, shown = each.run, {name: f"{each.ms(name):.1f}" for name in names}
        shown[each.best] = f"**{shown[each.best]}**"
        setting = [f"{run['link']:g}", f"{run['capacity']:.0%}", str(run["batch"])]
        ratios = [str(each.over(ON_DEMAND)), str(each.over_best()), str(each.over_best(UNTRAINED))]
        rows.append([*setting, *shown.values(), f"{each.bound_ms:.1f}", *ratios])
    head = [
        "link",
        "cached",
        "batch",
        *names,
        "bound",
        "auto / on demand",
        "auto / best fixed",
        "auto / best untrained",
    ]
    untrained = statistics.median(each.over_best(UNTRAINED).value for each in compared)
    differ = sum(not each.run["identical"] for each in compared)
    return (
        f"{markdown(head, rows)}\n\nMedian of auto / best untrained: {untrained:.3f}. "
        f"Tokens differ in {differ} of {len(compared)} settings."
    )
