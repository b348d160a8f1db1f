"""Miss policies: what happens to experts that a layer needs and the device does not hold.

T tokens, E routed experts per layer, K experts per token. Experts are numbered 0..E-1 within their layer.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.policies.base import CacheShape, Policy, PolicyConfig, PolicyRegistry, number
from expertcast.runtime.storage.layout import FULL, PRECISIONS, is_better


@dataclass(slots=True, kw_only=True)
class Lookup:
    """One layer's routing against the cache."""

    layer: int
    ids: Sequence[Sequence[int]]
    """T rows of K experts, in the router's order."""
    weights: Sequence[Sequence[float]]
    """Combine weights beside them."""
    probabilities: Callable[[], Sequence[Sequence[float]]]
    """T rows of E: the router's softmax over all experts; a call costs a copy to the host on a device."""
    held: Mapping[int, str]
    """Experts of this layer that have a slot, with the precision of what lies in it."""
    free: int
    """Slots that hold nothing."""

    def missing(self) -> set[int]:
        """The experts that are routed to and have no slot."""
        return {expert for row in self.ids for expert in row if expert not in self.held}

    def shares(self) -> dict[int, float]:
        """The largest part of any token's combine weights that each routed expert has, times K: 1 is a token's mean.

        Models scale their combine weights differently, or not at all; parts of a token's sum are alike in all of them.
        """
        best: dict[int, float] = {}
        for row, weights in zip(self.ids, self.weights, strict=True):
            scale = len(row) / (sum(weights) or 1.0)
            for expert, weight in zip(row, weights, strict=True):
                best[expert] = max(weight * scale, best.get(expert, 0.0))
        return best


@dataclass(slots=True, kw_only=True)
class Verdict:
    """What becomes of a layer's missing experts. Those that are not named are fetched in full precision."""

    precision: dict[int, str] = field(default_factory=dict)
    """Fetched at this precision; naming a held expert asks for it again unless what it holds is as good."""
    dropped: set[int] = field(default_factory=set)
    """Not executed: their weight becomes 0, that of the others stays."""
    substitute: dict[int, int] = field(default_factory=dict)
    """Executed in their place, with the weight that the missing expert had; held ones only."""


class MissPolicy(Policy):
    """Decides per layer, once its routing is known."""

    lossy: ClassVar[bool] = True
    """Whether the output may differ from the resident model's."""

    @property
    def precisions(self) -> tuple[str, ...]:
        """Copies beside the full ones that the store must hold."""
        return tuple(level for level in getattr(self.config, "levels", ()) if level != FULL)

    @abstractmethod
    def decide(self, lookup: Lookup) -> Verdict:
        """Called when at least one expert that a layer needs is missing, or is held in less than full precision."""


def check_levels(levels: Sequence[str], least: int, most: int = 1 + len(PRECISIONS)) -> None:
    """Refuse precisions that a policy cannot choose among.

    Raises:
        ExpertcastError: an unknown precision, an order other than best first, or too few or too many of them.
    """
    text, allowed = "/".join(levels), "/".join((FULL, *PRECISIONS))
    known = all(level in (FULL, *PRECISIONS) for level in levels)
    if not known or not all(is_better(*pair) for pair in pairwise(levels)):
        raise ExpertcastError(f"levels={text}: give precisions of {allowed}, best first")
    if not least <= len(levels) <= most:
        raise ExpertcastError(f"levels={text}: give {least} to {most} of {allowed}, best first")


class Fetch(MissPolicy):
    """Waits for every missing expert: the output is the resident model's."""

    name = "fetch"
    lossy = False

    def decide(self, lookup: Lookup) -> Verdict:
        return Verdict()


@dataclass(frozen=True, kw_only=True)
class FetchLowestConfig(PolicyConfig):
    """The precisions, of which the lowest is loaded."""

    levels: tuple[str, ...] = ("full", "int4")
    """Precisions, best first; only the last one is loaded for a miss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_levels(self.levels, least=1)


class FetchLowest(MissPolicy):
    """The shortest copy for every miss. What is held stays as it is, whatever its precision."""

    name = "fetch_lowest"
    config_class = FetchLowestConfig
    config: FetchLowestConfig

    @property
    def precisions(self) -> tuple[str, ...]:
        return super().precisions[-1:]

    def decide(self, lookup: Lookup) -> Verdict:
        return Verdict(precision=dict.fromkeys(lookup.missing(), self.config.levels[-1]))


@dataclass(frozen=True, kw_only=True)
class FetchPriorityConfig(PolicyConfig):
    """The precisions, and which experts are important."""

    levels: tuple[str, ...] = ("full", "int8", "int4")
    """Precisions, best first: the first for important experts, and for all of them where there is room."""
    percentile: float = number(60.0, "[0, 100]")
    """Experts whose gate score lies below this percentile of the run's misses are not important."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_levels(self.levels, least=2)


class FetchPriority(MissPolicy):
    """Loads misses in the highest precision and, under pressure, less important experts in lower ones.

    Pressure: a layer misses more experts than there are free slots. An expert's score is its largest share of any
    token's combine weights; its percentile is taken over the last 1024 misses. Experts below the percentile are spread
    evenly over the lower levels: with two of them, the bottom 30 in 100 get the second. SpecMD gives the levels and
    the 60th percentile, and says "under capacity constraints"; the rest is this project's.

    An expert that is held in a lower precision and is important now is asked for again in the first one.
    """

    name = "fetch_priority"
    config_class = FetchPriorityConfig
    config: FetchPriorityConfig

    def __init__(self, config: FetchPriorityConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._seen = RunningRank()

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


@dataclass(frozen=True, kw_only=True)
class CascadeConfig(PolicyConfig):
    """The precisions, and the scores between which each of them is taken."""

    levels: tuple[str, ...] = ("full", "int4", "int2")
    """Precisions, best first: for scores of `important` and more, below that, and below `minor`. With two of them,
    all below `important` get the second."""
    important: float = 1.0
    """Score from which an expert comes in the first precision; 1 is the mean of a token's experts."""
    minor: float = 0.25
    """Score below which an expert comes in the last precision."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_levels(self.levels, least=2, most=3)
        if not 0 <= self.minor <= self.important:
            raise ExpertcastError(
                f"important={self.important:g} and minor={self.minor:g}: give 0 <= minor <= important, such as 0.25 "
                "and 1"
            )


class Cascade(MissPolicy):
    """Loads a missing expert in the precision that its score deserves (HOBBIT's cascade); never drops.

    The score is the expert's share of a token's combine weights times K, which has mean 1 for any model and any K. The
    paper gives no thresholds: with 1 and 0.25 a third of what the reference model routes falls into each band.
    An expert that is held in a lower precision than its score deserves now is asked for again."""

    name = "cascade"
    config_class = CascadeConfig
    config: CascadeConfig

    def decide(self, lookup: Lookup) -> Verdict:
        wanted = {}
        for expert, share in lookup.shares().items():
            level = self._level(share)
            held = lookup.held.get(expert)
            if held is None or is_better(level, held):
                wanted[expert] = level
        return Verdict(precision=wanted)

    def _level(self, share: float) -> str:
        config = self.config
        below = (share < config.important) + (share < config.minor)
        return config.levels[min(below, len(config.levels) - 1)]


@dataclass(frozen=True, kw_only=True)
class DropConfig(PolicyConfig):
    """Which experts are never dropped."""

    fetched: int = number(2, "[1, inf)")
    """So many of a token's heaviest experts are always fetched."""


class Drop(MissPolicy):
    """Skips missing experts that no token ranks among its heaviest; the others keep their weights.

    The paper reports that models hold up against changes beyond rank 2, and gives no cut-off.
    """

    name = "drop"
    config_class = DropConfig
    config: DropConfig

    def decide(self, lookup: Lookup) -> Verdict:
        return Verdict(dropped=low_ranked(lookup, self.config.fetched))


def low_ranked(lookup: Lookup, fetched: int) -> set[int]:
    """Missing experts that are not among any token's `fetched` heaviest."""
    heavy: set[int] = set()
    for row, weights in zip(lookup.ids, lookup.weights, strict=True):
        places = sorted(range(len(row)), key=lambda place: -weights[place])
        heavy.update(row[place] for place in places[:fetched])
    return lookup.missing() - heavy


@dataclass(frozen=True, kw_only=True)
class DropCascadeConfig(CascadeConfig, DropConfig):
    """What is never dropped, and the precisions of what is fetched."""


class DropCascade(Cascade):
    """Drops as `drop` does, and loads the others as `cascade` does."""

    name = "drop_cascade"
    config_class = DropCascadeConfig
    config: DropCascadeConfig

    def decide(self, lookup: Lookup) -> Verdict:
        verdict = super().decide(lookup)
        verdict.dropped = low_ranked(lookup, self.config.fetched)
        for expert in verdict.dropped:
            del verdict.precision[expert]
        return verdict


@dataclass(frozen=True, kw_only=True)
class SubstituteConfig(PolicyConfig):
    """How much worse a substitute may be."""

    tolerance: float = number(0.5, "[0, 1]")
    """Part of the missing expert's router probability that its substitute's may lack."""


class Substitute(MissPolicy):
    """Of the held experts that none of the missing one's tokens uses already, the likeliest; fetched if there is none.

    Scores are router probabilities, their mean over the tokens that chose the missing expert. A substitute stands for
    one expert of a token only; the heaviest missing experts choose first. The paper gives no tolerance: with half of
    the score, about 45 in 100 misses of the reference model at a quarter of its experts find a substitute.
    """

    name = "substitute"
    config_class = SubstituteConfig
    config: SubstituteConfig

    def decide(self, lookup: Lookup) -> Verdict:
        tokens = _tokens_of_missing(lookup)
        if not tokens:
            return Verdict()
        probabilities = lookup.probabilities()
        taken = [set(row) for row in lookup.ids]
        substitute = {}
        for expert in sorted(tokens, key=lambda key: (-max(tokens[key].values()), key)):
            rows = tokens[expert]
            found = self._nearest(expert, set(lookup.held).difference(*(taken[t] for t in rows)), probabilities, rows)
            if found is not None:
                substitute[expert] = found
                for t in rows:
                    taken[t].add(found)
        return Verdict(substitute=substitute)

    def _nearest(
        self, missing: int, candidates: set[int], probabilities: Sequence[Sequence[float]], rows: Collection[int]
    ) -> int | None:
        """The likeliest candidate, if it is likely enough."""

        def score(expert: int) -> float:
            return sum(probabilities[t][expert] for t in rows)

        best = max(candidates, key=lambda expert: (score(expert), -expert), default=None)
        if best is None or score(best) < (1 - self.config.tolerance) * score(missing):
            return None
        return best


def _tokens_of_missing(lookup: Lookup) -> dict[int, dict[int, float]]:
    """The tokens (rows) that chose each missing expert, with the weights that they gave it."""
    tokens: dict[int, dict[int, float]] = {expert: {} for expert in lookup.missing()}
    for t, (row, weights) in enumerate(zip(lookup.ids, lookup.weights, strict=True)):
        for expert, weight in zip(row, weights, strict=True):
            if expert in tokens:
                tokens[expert][t] = weight
    return tokens


MISS: PolicyRegistry[MissPolicy] = PolicyRegistry(
    "miss policy", Fetch, FetchLowest, FetchPriority, Cascade, Drop, DropCascade, Substitute
)
