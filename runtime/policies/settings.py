"""One policy of each kind: what `offload`, the simulator and the command line take."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.policies.eviction import EVICTION, EvictionPolicy
from expertcast.runtime.policies.miss import MISS, MissPolicy
from expertcast.runtime.policies.pre_eviction import PRE_EVICTION, PreEviction
from expertcast.runtime.policies.prefetch import PREFETCH, PrefetchPolicy
from expertcast.runtime.policies.registry import CacheShape
from expertcast.runtime.policies.routing import ROUTING, RoutingPolicy
from expertcast.runtime.policies.scope import SCOPES, Eviction


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """Which policies decide. A policy is given as `name`, `name:option=value,...` or by its configuration.

    Raises:
        ExpertcastError: an unknown policy, option or scope.
    """

    eviction: Any = "lru"
    """Which expert gives up its slot."""
    prefetch: Any = "top_k"
    """Which of a forecast's experts are asked for; nothing is without a predictor."""
    miss: Any = "fetch"
    """What becomes of experts that a layer needs and the device does not hold."""
    routing: Any = "standard"
    """Which experts a layer executes."""
    pre_eviction: Any = "none"
    """Slots given up before a layer's routing is known."""
    scope: str = "global"
    """Experts of all layers compete for all slots (`global`), or each layer has an equal share (`layer`)."""

    def __post_init__(self) -> None:
        for name, registry in REGISTRIES.items():
            object.__setattr__(self, name, registry.choose(getattr(self, name)))
        if self.scope not in SCOPES:
            raise ExpertcastError(f"unknown scope {self.scope!r}: choose from {', '.join(SCOPES)}")

    @property
    def lossy(self) -> bool:
        """Whether the output may differ from the resident model's."""
        return bool(self.miss.cls.lossy or self.routing.cls.lossy)

    def as_dict(self) -> dict[str, str]:
        """Every policy as text."""
        return {field.name: str(getattr(self, field.name)) for field in fields(self)}

    def make(self, shape: CacheShape) -> PolicySet:
        """The policies themselves, with nothing learnt."""
        return PolicySet(
            eviction=Eviction(self.eviction, shape, self.scope),
            prefetch=self.prefetch.make(shape),
            miss=self.miss.make(shape),
            routing=self.routing.make(shape),
            pre_eviction=self.pre_eviction.make(shape),
        )


@dataclass(slots=True, kw_only=True)
class PolicySet:
    """Policies at work in one run."""

    eviction: Eviction
    prefetch: PrefetchPolicy
    miss: MissPolicy
    routing: RoutingPolicy
    pre_eviction: PreEviction


REGISTRIES: dict[str, Any] = {
    "eviction": EVICTION,
    "prefetch": PREFETCH,
    "miss": MISS,
    "routing": ROUTING,
    "pre_eviction": PRE_EVICTION,
}

__all__ = ["REGISTRIES", "EvictionPolicy", "MissPolicy", "Policies", "PolicySet", "PrefetchPolicy", "RoutingPolicy"]
