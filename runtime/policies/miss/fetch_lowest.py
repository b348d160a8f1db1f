"""Load whatever is missing in the lowest precision there is (row A6)."""

from __future__ import annotations

from dataclasses import dataclass

from expertcast.runtime.policies.miss.base import Lookup, MissPolicy, Verdict, check_levels, copies_of
from expertcast.runtime.policies.registry import PolicyConfig


@dataclass(frozen=True, kw_only=True)
class FetchLowestConfig(PolicyConfig):
    """The precisions, of which the lowest is loaded."""

    levels: tuple[str, ...] = ("full", "int4")
    """Precisions, best first; only the last one is loaded for a miss."""

    def __post_init__(self) -> None:
        check_levels(self.levels, least=1)


class FetchLowest(MissPolicy):
    """The shortest copy for every miss. What is held stays as it is, whatever its precision."""

    name = "fetch_lowest"
    config_class = FetchLowestConfig
    config: FetchLowestConfig

    @property
    def precisions(self) -> tuple[str, ...]:
        return copies_of(self.config.levels[-1:])

    def decide(self, lookup: Lookup) -> Verdict:
        return Verdict(precision=dict.fromkeys(lookup.missing(), self.config.levels[-1]))
