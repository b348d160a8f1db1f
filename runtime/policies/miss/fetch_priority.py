"""Load what is missing in the highest precision, and less important experts in lower ones under pressure (row A7).

The paper gives the levels (int8, int4, int2), that low-importance experts are those in the bottom 60th percentile of
the gate score, and that they fall back "under capacity constraints". Read here as:

- pressure: a layer misses more experts than there are free slots, so that something has to be evicted for them;
- the percentile is taken over the misses of the run so far (the last 1024), each by its largest share of any token's
  combine weights;
- the experts below it are spread evenly over the lower levels: with two of them, the bottom 30 in 100 get the second.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from dataclasses import dataclass

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.policies.miss.base import Lookup, MissPolicy, Verdict, check_levels, copies_of
from expertcast.runtime.policies.registry import CacheShape, PolicyConfig
from expertcast.runtime.storage.precision import is_better


@dataclass(frozen=True, kw_only=True)
class FetchPriorityConfig(PolicyConfig):
    """The precisions, and which experts are important."""

    levels: tuple[str, ...] = ("full", "int8", "int4")
    """Precisions, best first: the first for important experts, and for all of them where there is room."""
    percentile: float = 60.0
    """Experts whose gate score lies below this percentile of the run's misses are not important."""

    def __post_init__(self) -> None:
        check_levels(self.levels, least=2)
        if not 0 <= self.percentile <= 100:
            raise ExpertcastError(f"percentile={self.percentile:g}: give 0 to 100")


class FetchPriority(MissPolicy):
    """Degrades a miss by how its score compares with those of earlier misses.

    An expert that is held in a lower precision and is important now is asked for again in the first one.
    """

    name = "fetch_priority"
    config_class = FetchPriorityConfig
    config: FetchPriorityConfig

    def __init__(self, config: FetchPriorityConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._seen = RunningRank()

    @property
    def precisions(self) -> tuple[str, ...]:
        return copies_of(self.config.levels)

    def decide(self, lookup: Lookup) -> Verdict:
        best = self.config.levels[0]
        by_expert = lookup.shares()
        missing = lookup.missing()
        pressure = len(missing) > lookup.free
        wanted = {}
        for expert, share in by_expert.items():
            if expert in missing:
                wanted[expert] = self._level(share) if pressure else best
            elif is_better(best, lookup.held[expert]) and self._level(share) == best:
                wanted[expert] = best
        for expert in missing:
            self._seen.add(by_expert[expert])
        return Verdict(precision=wanted)

    def _level(self, share: float) -> str:
        rank, cut = self._seen.rank(share), self.config.percentile / 100
        best, *lower = self.config.levels
        return best if rank >= cut else lower[-1 - int(rank / cut * len(lower))]


class RunningRank:
    """Where a value lies among the last ones seen, in O(log n)."""

    def __init__(self, window: int = 1024) -> None:
        self._window = window
        self._values: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, value: float) -> None:
        """See a value; the oldest one is forgotten when there are more than the window holds."""
        if len(self._values) == self._window:
            del self._sorted[bisect_left(self._sorted, self._values.popleft())]
        self._values.append(value)
        insort(self._sorted, value)

    def rank(self, value: float) -> float:
        """Part of the values seen that are not above it, in [0, 1]; 1 before any was seen."""
        return bisect_right(self._sorted, value) / len(self._sorted) if self._sorted else 1.0
