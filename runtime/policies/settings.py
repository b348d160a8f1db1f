"""One policy of each kind: what `offload`, the simulator and the command line take."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Generic, overload

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.policies.eviction import EVICTION, EvictionPolicy
from expertcast.runtime.policies.miss import MISS, MissPolicy
from expertcast.runtime.policies.pre_eviction import PRE_EVICTION, PreEviction
from expertcast.runtime.policies.prefetch import PREFETCH, PrefetchPolicy
from expertcast.runtime.policies.registry import CacheShape, Choice, P, PolicyConfig, PolicyRegistry
from expertcast.runtime.policies.routing import ROUTING, RoutingPolicy
from expertcast.runtime.policies.scope import SCOPES, Eviction


class Chosen(Generic[P]):
    """A field that takes one of a registry's policies as text, configuration or choice, and holds the choice."""

    def __init__(self, registry: PolicyRegistry[P], default: str) -> None:
        self.registry, self.default = registry, default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> str: ...

    @overload
    def __get__(self, instance: object, owner: type) -> Choice[P]: ...

    def __get__(self, instance: object | None, owner: type) -> Choice[P] | str:
        """The choice; of the class, the default."""
        if instance is None:
            return self.default
        choice: Choice[P] = vars(instance)[self._name]
        return choice

    def __set__(self, instance: object, given: str | Choice[P] | PolicyConfig) -> None:
        vars(instance)[self._name] = self.registry.choose(given)


@dataclass(frozen=True, kw_only=True)
class Policies:
    """Which policies decide. A policy is given as `name`, `name:option=value,...` or by its configuration.

    Raises:
        ExpertcastError: an unknown policy, option or scope.
    """

    eviction: Chosen[EvictionPolicy] = Chosen(EVICTION, "lru")
    """Which expert gives up its slot."""
    prefetch: Chosen[PrefetchPolicy] = Chosen(PREFETCH, "top_k")
    """Which of a forecast's experts are asked for; nothing is without a predictor."""
    miss: Chosen[MissPolicy] = Chosen(MISS, "fetch")
    """What becomes of experts that a layer needs and the device does not hold."""
    routing: Chosen[RoutingPolicy] = Chosen(ROUTING, "standard")
    """Which experts a layer executes."""
    pre_eviction: Chosen[PreEviction] = Chosen(PRE_EVICTION, "none")
    """Slots given up before a layer's routing is known."""
    scope: str = "global"
    """Experts of all layers compete for all slots (`global`), or each layer has an equal share (`layer`)."""

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise ExpertcastError(f"unknown scope {self.scope!r}: choose from {', '.join(SCOPES)}")

    @property
    def lossy(self) -> bool:
        """Whether the output may differ from the resident model's."""
        return self.miss.cls.lossy or self.routing.cls.lossy

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
