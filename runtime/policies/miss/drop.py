"""Skip missing experts that no token ranks high (row A9).

The paper reports that models hold up against changes beyond rank 2, and gives no cut-off: the two heaviest experts of
every token are fetched here, those from the third on are dropped when they are missing.
"""

from __future__ import annotations

from dataclasses import dataclass

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.policies.miss.base import Lookup, MissPolicy, Verdict
from expertcast.runtime.policies.registry import PolicyConfig


@dataclass(frozen=True, kw_only=True)
class DropConfig(PolicyConfig):
    """Which experts are never dropped."""

    fetched: int = 2
    """So many of a token's heaviest experts are always fetched."""

    def __post_init__(self) -> None:
        if self.fetched < 1:
            raise ExpertcastError(f"fetched={self.fetched}: give 1 or more, a token cannot lose all of its experts")


class Drop(MissPolicy):
    """The rest of a token's experts keep their weights: its output gets smaller by what is left out."""

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
