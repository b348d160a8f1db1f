"""Load a missing expert in the precision that its gate score deserves (row A8, HOBBIT's cascade).

The paper names a score with thresholds and gives none. The score here is the expert's share of a token's combine
weights times K, which has mean 1 for any model and any K. With thresholds 1 (the mean) and 0.25, a third of what the
reference model routes falls into each of the three bands.
"""

from __future__ import annotations

from dataclasses import dataclass

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.policies.miss.base import Lookup, MissPolicy, Verdict, check_levels, copies_of
from expertcast.runtime.policies.registry import PolicyConfig
from expertcast.runtime.storage.precision import is_better


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
        check_levels(self.levels, least=2, most=3)
        if not 0 <= self.minor <= self.important:
            raise ExpertcastError(
                f"important={self.important:g} and minor={self.minor:g}: give 0 <= minor <= important, such as 0.25 "
                "and 1"
            )


class Cascade(MissPolicy):
    """Never drops. An expert that is held in a lower precision than its score deserves now is asked for again."""

    name = "cascade"
    config_class = CascadeConfig
    config: CascadeConfig

    @property
    def precisions(self) -> tuple[str, ...]:
        return copies_of(self.config.levels)

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
