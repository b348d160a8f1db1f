"""One policy of each kind: what `offload`, the simulator and the command line take."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Generic, overload

from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.policies.base import CacheShape, Choice, P, PolicyConfig, PolicyRegistry
from expertcast.runtime.policies.belady import Belady, bypass_misses
from expertcast.runtime.policies.eviction import (
    FIFO,
    FLD,
    LFRU,
    LFU,
    LHU,
    LRU,
    PRE_EVICTION,
    SCOPES,
    Eviction,
    EvictionPolicy,
    Importance,
    LeastStale,
    Marking,
    PreEviction,
    Score,
)
from expertcast.runtime.policies.forecast import ForecastEviction
from expertcast.runtime.policies.miss import MISS, MissPolicy
from expertcast.runtime.policies.next_use import NextUse
from expertcast.runtime.policies.prefetch import MOST_OVERFETCH, PREFETCH, PrefetchPolicy
from expertcast.runtime.policies.routing import ROUTING, RoutingPolicy

EVICTION: PolicyRegistry[EvictionPolicy] = PolicyRegistry(
    "eviction policy",
    LRU,
    FIFO,
    Marking,
    LFU,
    LFRU,
    LHU,
    FLD,
    Score,
    LeastStale,
    Importance,
    NextUse,
    ForecastEviction,
    Belady,
)

AUTO, ALWAYS, NEVER = "auto", "always", "never"
FORECASTS = (AUTO, ALWAYS, NEVER)
"""Which forecasts are made."""

__all__ = ["EVICTION", "LRU", "Belady", "EvictionPolicy", "bypass_misses"]


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

    Example:
        >>> import expertcast
        >>> expertcast.Policies(eviction="lfu", scope="layer").scope
        'layer'
        >>> expertcast.OffloadConfig(policies=expertcast.Policies(eviction="lfu")).mode
        'exact'
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

    @property
    def evicts_by_forecasts(self) -> bool:
        """Whether forecasts are read for more than prefetches."""
        return self.eviction.reads_forecasts or self.pre_eviction.active


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A published system's policies, the predictor that it forecasts with, and what it was measured with where its
    paper says so."""

    policies: Policies
    source: str
    """Where the configuration comes from."""
    predictor: str | None = "router_input"
    capacity: float | None = None
    """Share of all experts that fit on the device in the published runs."""
    bandwidth: float | None = None
    """Bytes per second of the link there."""
    base_precision: str | None = None
    """What experts are stored and copied in there."""


def preset(name: str) -> Preset:
    """A preset by its name.

    Raises:
        ExpertcastError: unknown name; the message lists the known ones.
    """
    if name not in PRESETS:
        raise ExpertcastError(f"unknown preset {name!r}: choose from {', '.join(PRESETS)}")
    return PRESETS[name]


def published(name: str) -> tuple[float, float, str]:
    """Capacity, bandwidth and base precision that a preset was published with (row A25).

    Raises:
        ExpertcastError: unknown name, or its paper gives no such numbers.
    """
    found = preset(name)
    if found.capacity is None or found.bandwidth is None or found.base_precision is None:
        known = ", ".join(each for each, made in PRESETS.items() if made.capacity is not None)
        raise ExpertcastError(
            f"preset {name!r} was published without capacity, bandwidth and precision: {known} have them"
        )
    return found.capacity, found.bandwidth, found.base_precision


def _specmd(source: str, policies: Policies, predictor: str | None = "router_input") -> Preset:
    """A row of SpecMD's Table 1: 5% of the experts, 4-bit experts, 5 GB/s (row A25)."""
    return Preset(
        policies=policies, source=f"SpecMD Table 1, {source}", predictor=predictor,
        capacity=0.05, bandwidth=5e9, base_precision="int4",
    )  # fmt: skip


def _activeevict(source: str, eviction: str = "importance", **changes: str) -> Preset:
    chosen = {"prefetch": "none", "pre_eviction": "gap", "routing": "budget", "scope": "layer"} | changes
    return Preset(policies=Policies(eviction=eviction, **chosen), source=source)


PRESETS: dict[str, Preset] = {
    "on_demand": Preset(policies=Policies(prefetch="none"), predictor=None, source="row D13: lru, nothing forecast"),
    "moe_offloading": Preset(policies=Policies(scope="layer"), source="row D13: Eliseev and Mazur, per-layer lru"),
    "moe_apex": Preset(
        policies=Policies(prefetch="top_k:overfetch=1.5", scope="layer"),
        source="row D13: more of the router's experts; the paper gives no number, 1.5 K are ours",
    ),
    "zero_infinity": Preset(
        policies=Policies(eviction="fifo", prefetch=f"top_k:overfetch={MOST_OVERFETCH}"),
        source="row E21: the next layer's experts whole, whatever is forecast; no router is waited for",
    ),
    "specmd_1": _specmd("Eliseev and Mazur", Policies()),
    "specmd_2": _specmd("Zhu et al.", Policies(eviction="score", prefetch="percentile", miss="substitute")),
    "specmd_3": _specmd("HOBBIT", Policies(eviction="lhu", miss="cascade")),
    "specmd_4": _specmd(
        "mixture of cache-conditional experts", Policies(prefetch="none", routing="cache_aware"), predictor=None
    ),
    "specmd_5": _specmd("the paper's own", Policies(eviction="least_stale", prefetch="percentile")),
    "activeevict": _activeevict("ActiveEvict, rows D5 to D10"),
    "activeevict_prediction_only": _activeevict("row D12: alpha 0", "importance:alpha=0.0"),
    "activeevict_hotness_only": _activeevict("row D12: alpha 1", "importance:alpha=1.0"),
    "activeevict_lru": _activeevict("row D12: lru decides what is released", "lru"),
    "activeevict_fixed_top_k": _activeevict("row D12: pre-eviction without a routing budget", routing="standard"),
}
