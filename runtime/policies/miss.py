"""Miss policies: how a layer treats the experts that it needs and that are not resident.

T tokens, E routed experts per layer, K experts per token. Experts are numbered 0..E-1 within their layer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, ClassVar

from pydantic import Field

from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.policies.base import Policy, PolicyConfig, PolicyRegistry
from expertcast.runtime.storage.layout import FULL, PRECISIONS, is_better


@dataclass(slots=True, kw_only=True)
class Lookup:
    """Routing of one layer and the residents of the cache."""

    layer: int
    ids: Sequence[Sequence[int]]
    """Experts in the order of the router [T][K]."""
    weights: Sequence[Sequence[float]]
    """Combine weights of the experts [T][K]."""
    probabilities: Callable[[], Sequence[Sequence[float]]]
    """Returns the softmax of the router [T][E]; on a device each call costs a copy to the host."""
    held: Mapping[int, str]
    """Precision of each resident expert of the layer."""
    free: int
    """Number of empty slots."""

    def missing(self) -> set[int]:
        """Return the routed experts that are absent."""
        return {expert for row in self.ids for expert in row if expert not in self.held}

    def shares(self) -> dict[int, float]:
        """Return the importance of each routed expert: its largest share of any token's combine weights, times K.

        The mean over the experts of a token is 1 for every model, whether it normalises the weights or not.
        """
        best: dict[int, float] = {}
        for row, weights in zip(self.ids, self.weights, strict=True):
            scale = len(row) / (sum(weights) or 1.0)
            for expert, weight in zip(row, weights, strict=True):
                best[expert] = max(weight * scale, best.get(expert, 0.0))
        return best


@dataclass(slots=True, kw_only=True)
class MissDecision:
    """Treatment of the missing experts of a layer. Experts that it does not mention are loaded in full precision."""

    precision: dict[int, str] = field(default_factory=dict)
    """Precision to load an expert in. A resident expert is loaded again if this is better than what it has."""
    dropped: set[int] = field(default_factory=set)
    """Experts that are not executed: their weight becomes 0, other weights stay."""
    substitute: dict[int, int] = field(default_factory=dict)
    """Resident expert that is executed instead of a missing one, with the weight of the missing one."""


class MissPolicy(Policy):
    """Base class of miss policies, which decide per layer once its routing is known."""

    lossy: ClassVar[bool] = True
    """Whether the output may differ from the resident model's."""

    @property
    def precisions(self) -> tuple[str, ...]:
        """Precisions that the store must hold in addition to the full one."""
        return tuple(level for level in getattr(self.config, "levels", ()) if level != FULL)

    @abstractmethod
    def decide(self, lookup: Lookup) -> MissDecision:
        """Return the treatment of missing experts.

        The cache calls this if an expert that the layer needs is missing or resident in less than full precision.
        """


def check_levels(levels: Sequence[str], least: int, most: int = 1 + len(PRECISIONS)) -> None:
    """Check the precisions that a policy chooses among.

    Args:
        levels: precisions, best first.
        least: minimum number of precisions.
        most: maximum number of precisions.

    Raises:
        ExpertcastError: a precision is unknown, the order is not best first, or there are too few or too many.
    """
    text, allowed = "/".join(levels), "/".join((FULL, *PRECISIONS))
    known = all(level in (FULL, *PRECISIONS) for level in levels)
    if not known or not all(is_better(*pair) for pair in pairwise(levels)):
        raise ExpertcastError(f"levels={text}: give precisions of {allowed}, best first")
    if not least <= len(levels) <= most:
        raise ExpertcastError(f"levels={text}: give {least} to {most} of {allowed}, best first")


class Fetch(MissPolicy):
    """Loads every missing expert in full precision and waits for it."""

    name = "fetch"
    lossy = False

    def decide(self, lookup: Lookup) -> MissDecision:
        return MissDecision()


@dataclass(frozen=True, kw_only=True)
class FetchLowestConfig(PolicyConfig):
    """Options of :class:`FetchLowest`."""

    levels: tuple[str, ...] = ("full", "int4")
    """Precisions, best first; misses are loaded in the last one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_levels(self.levels, least=1)


class FetchLowest(MissPolicy):
    """Loads every missing expert in the lowest precision; resident experts keep theirs.

    Source: SpecMD, fetch lowest bit.
    """

    name = "fetch_lowest"
    config_class = FetchLowestConfig
    config: FetchLowestConfig

    @property
    def precisions(self) -> tuple[str, ...]:
        return super().precisions[-1:]

    def decide(self, lookup: Lookup) -> MissDecision:
        return MissDecision(precision=dict.fromkeys(lookup.missing(), self.config.levels[-1]))


@dataclass(frozen=True, kw_only=True)
class CascadeConfig(PolicyConfig):
    """Options of :class:`Cascade`."""

    levels: tuple[str, ...] = ("full", "int4", "int2")
    """Two or three precisions, best first. The first is for scores from `important`, the last of three for scores below
    `minor`, and the second for all other scores."""
    important: float = 1.0
    """Score from which an expert is loaded in the first precision; 1 is the mean over a token's experts."""
    minor: float = 0.25
    """Score below which an expert is loaded in the last precision."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_levels(self.levels, least=2, most=3)
        if not 0 <= self.minor <= self.important:
            raise ExpertcastError(
                f"important={self.important:g} and minor={self.minor:g}: give 0 <= minor <= important, such as 0.25 "
                "and 1"
            )


class Cascade(MissPolicy):
    """Loads each missing expert in a precision that depends on its score.

    The score is :meth:`Lookup.shares`, with mean 1 for every model. A resident expert of lower precision than its
    score demands is loaded again.

    Source: precision cascade, HOBBIT (2024). The paper states no thresholds; the defaults put a third of the reference
    model's routed experts into each band.
    """

    name = "cascade"
    config_class = CascadeConfig
    config: CascadeConfig

    def decide(self, lookup: Lookup) -> MissDecision:
        config, wanted = self.config, {}
        for expert, share in lookup.shares().items():
            below = (share < config.important) + (share < config.minor)
            level = config.levels[min(below, len(config.levels) - 1)]
            held = lookup.held.get(expert)
            if held is None or is_better(level, held):
                wanted[expert] = level
        return MissDecision(precision=wanted)


@dataclass(frozen=True, kw_only=True)
class DropConfig(PolicyConfig):
    """Options of :class:`Drop`."""

    fetched: Annotated[int, Field(ge=1)] = 2
    """Number of heaviest experts per token that are always loaded."""


class Drop(MissPolicy):
    """Skips missing experts that are not among the heaviest of any token; the others keep their weights.

    Source: SpecMD, drop priority. The paper states no cut-off and reports that quality holds for changes beyond rank 2.
    """

    name = "drop"
    config_class = DropConfig
    config: DropConfig

    def decide(self, lookup: Lookup) -> MissDecision:
        return MissDecision(dropped=low_ranked(lookup, self.config.fetched))


def low_ranked(lookup: Lookup, fetched: int) -> set[int]:
    """Return the missing experts that are not among the `fetched` heaviest of any token."""
    heavy: set[int] = set()
    for row, weights in zip(lookup.ids, lookup.weights, strict=True):
        places = sorted(range(len(row)), key=lambda place: -weights[place])
        heavy.update(row[place] for place in places[:fetched])
    return lookup.missing() - heavy


@dataclass(frozen=True, kw_only=True)
class DropCascadeConfig(CascadeConfig, DropConfig):
    """Options of :class:`DropCascade`."""


class DropCascade(Cascade):
    """Skips the missing experts that `drop` skips and loads the others as `cascade` does.

    Source: SpecMD, drop priority cascade.
    """

    name = "drop_cascade"
    config_class = DropCascadeConfig
    config: DropCascadeConfig

    def decide(self, lookup: Lookup) -> MissDecision:
        decision = super().decide(lookup)
        decision.dropped = low_ranked(lookup, self.config.fetched)
        for expert in decision.dropped:
            del decision.precision[expert]
        return decision


@dataclass(frozen=True, kw_only=True)
class SubstituteConfig(PolicyConfig):
    """Options of :class:`Substitute`."""

    tolerance: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Maximum relative loss of router probability: a substitute has at least (1 - tolerance) times the probability of
    the missing expert."""


class Substitute(MissPolicy):
    """Executes a resident expert of similar router probability instead of a missing one, or loads the missing one.

    The substitute is the resident expert with the highest probability, averaged over the tokens that chose the missing
    expert, among those that these tokens do not use yet. Missing experts choose in the order of their weight.

    Source: Zhu et al. (2025), as in SpecMD. The paper states no tolerance; with 0.5 about 45% of the reference model's
    misses find a substitute when a quarter of the experts is resident.
    """

    name = "substitute"
    config_class = SubstituteConfig
    config: SubstituteConfig

    def decide(self, lookup: Lookup) -> MissDecision:
        tokens: dict[int, dict[int, float]] = {expert: {} for expert in lookup.missing()}
        for t, (row, weights) in enumerate(zip(lookup.ids, lookup.weights, strict=True)):
            for expert, weight in zip(row, weights, strict=True):
                if expert in tokens:
                    tokens[expert][t] = weight
        if not tokens:
            return MissDecision()
        probabilities = lookup.probabilities()
        used = [set(row) for row in lookup.ids]
        substitute = {}
        for expert in sorted(tokens, key=lambda key: (-max(tokens[key].values()), key)):
            rows = tokens[expert]
            found = self._nearest(expert, set(lookup.held).difference(*(used[t] for t in rows)), probabilities, rows)
            if found is not None:
                substitute[expert] = found
                for t in rows:
                    used[t].add(found)
        return MissDecision(substitute=substitute)

    def _nearest(
        self, missing: int, candidates: set[int], probabilities: Sequence[Sequence[float]], rows: Collection[int]
    ) -> int | None:
        def score(expert: int) -> float:
            return sum(probabilities[t][expert] for t in rows)

        best = max(candidates, key=lambda expert: (score(expert), -expert), default=None)
        if best is None or score(best) < (1 - self.config.tolerance) * score(missing):
            return None
        return best


MISS: PolicyRegistry[MissPolicy] = PolicyRegistry(
    "miss policy", Fetch, FetchLowest, Cascade, Drop, DropCascade, Substitute
)
