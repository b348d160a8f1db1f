"""Selection of one policy of each kind, and presets of published systems."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Generic, overload

from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.policies.base import CacheShape, Choice, P, PolicyConfig, PolicyRegistry
from expertcast.runtime.policies.eviction import (
    FIFO,
    LFU,
    LHU,
    LRFU,
    LRU,
    PRE_EVICTION,
    SCOPES,
    Belady,
    Eviction,
    EvictionPolicy,
    Importance,
    LeastStale,
    NextUse,
    PreEviction,
    Score,
)
from expertcast.runtime.policies.miss import MISS, MissPolicy
from expertcast.runtime.policies.prefetch import MAX_OVERFETCH, PREFETCH, PrefetchPolicy
from expertcast.runtime.policies.routing import ROUTING, RoutingPolicy

EVICTION: PolicyRegistry[EvictionPolicy] = PolicyRegistry(
    "eviction policy",
    LRU,
    FIFO,
    LFU,
    LRFU,
    LHU,
    Score,
    LeastStale,
    Importance,
    NextUse,
    Belady,
)

AUTO, ALWAYS, NEVER = "auto", "always", "never"
FORECASTS = (AUTO, ALWAYS, NEVER)
"""Values of `OffloadConfig.forecasts`."""


class PolicyField(Generic[P]):
    """Descriptor of a dataclass field that accepts a policy as text, configuration or choice and stores the choice."""

    def __init__(self, registry: PolicyRegistry[P], default: str) -> None:
        self.registry, self.default = registry, default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> str: ...

    @overload
    def __get__(self, instance: object, owner: type) -> Choice[P]: ...

    def __get__(self, instance: object | None, owner: type) -> Choice[P] | str:
        """Return the choice of an instance, or the default text of the class."""
        if instance is None:
            return self.default
        choice: Choice[P] = vars(instance)[self._name]
        return choice

    def __set__(self, instance: object, policy: str | Choice[P] | PolicyConfig) -> None:
        vars(instance)[self._name] = self.registry.choose(policy)


@dataclass(frozen=True, kw_only=True, repr=False)
class Policies:
    """One policy of each kind: `name`, `name:option=value,...` or the configuration of the policy.

    Raises:
        ExpertcastError: a policy, an option or the scope is unknown.

    Example:
        >>> import expertcast
        >>> policies = expertcast.Policies(eviction="lfu", prefetch="percentile", scope="layer")
        >>> policies.eviction.name, policies.lossy
        ('lfu', False)
    """

    eviction: PolicyField[EvictionPolicy] = PolicyField(EVICTION, "lrfu")
    """Policy that selects the expert to evict."""
    prefetch: PolicyField[PrefetchPolicy] = PolicyField(PREFETCH, "top_k")
    """Policy that selects the forecast experts to prefetch; unused without a predictor."""
    miss: PolicyField[MissPolicy] = PolicyField(MISS, "fetch")
    """Policy for experts that a layer needs and that have no slot."""
    routing: PolicyField[RoutingPolicy] = PolicyField(ROUTING, "standard")
    """Policy that selects the experts that a layer executes."""
    pre_eviction: PolicyField[PreEviction] = PolicyField(PRE_EVICTION, "none")
    """Policy that frees slots before the routing of a layer is known."""
    scope: str = "global"
    """`global`: experts of all layers compete for all slots; `layer`: each layer has an equal share of the slots."""

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise ExpertcastError(f"unknown scope {self.scope!r}: choose from {', '.join(SCOPES)}")

    def __repr__(self) -> str:
        """The policies as arguments."""
        return f"Policies({', '.join(f'{kind}={text!r}' for kind, text in self.as_dict().items())})"

    @property
    def lossy(self) -> bool:
        """Whether the output may differ from the resident model's."""
        return self.miss.cls.lossy or self.routing.cls.lossy

    def as_dict(self) -> dict[str, str]:
        """Return the text form of every policy, by field name."""
        return {field.name: str(getattr(self, field.name)) for field in fields(self)}

    def make(self, shape: CacheShape) -> PolicySet:
        """Return new policies for a cache.

        Raises:
            ExpertcastError: an option does not suit the model, or a layer's share is too small for one token.
        """
        return PolicySet(
            eviction=Eviction(self.eviction, shape, self.scope),
            prefetch=self.prefetch.make(shape),
            miss=self.miss.make(shape),
            routing=self.routing.make(shape),
            pre_eviction=self.pre_eviction.make(shape),
        )


KINDS: dict[str, PolicyRegistry[Any]] = {
    kind: field.registry for kind, field in vars(Policies).items() if isinstance(field, PolicyField)
}
"""Registries of policies by kind."""


def parse_policies(words: Iterable[str]) -> Policies:
    """Return the policies of `kind=policy` words, such as `eviction=lfu` and `scope=layer`.

    Raises:
        ExpertcastError: an unknown kind or policy.
    """
    kinds = [field.name for field in fields(Policies)]
    given = dict(word.partition("=")[::2] for word in words)
    for kind in given:
        if kind not in kinds:
            raise ExpertcastError(f"policies {kind!r}: give one preset, or KIND=POLICY of {', '.join(kinds)}")
    return Policies(**given)  # type: ignore[arg-type]


@dataclass(slots=True, kw_only=True)
class PolicySet:
    """Policies of one run, with their state."""

    eviction: Eviction
    prefetch: PrefetchPolicy
    miss: MissPolicy
    routing: RoutingPolicy
    pre_eviction: PreEviction

    @property
    def evicts_by_forecasts(self) -> bool:
        """Whether eviction or pre-eviction reads forecasts."""
        return self.eviction.reads_forecasts or self.pre_eviction.active


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Policies and predictor of a published system."""

    policies: Policies
    source: str
    """Paper and section that define the configuration."""
    predictor: str | None = "router_input"
    """Name of the predictor; None: no forecasts."""


def preset(name: str) -> Preset:
    """Return the preset of a name.

    Raises:
        ExpertcastError: the name is unknown.
    """
    if name not in PRESETS:
        raise ExpertcastError(f"unknown preset {name!r}: choose from {', '.join(PRESETS)}, or give KIND=POLICY")
    return PRESETS[name]


def _specmd(source: str, policies: Policies, predictor: str | None = "router_input") -> Preset:
    """Return a configuration of SpecMD's Table 1. It was run with 5% of the experts, 4-bit experts and 5 GB/s."""
    return Preset(policies=policies, source=f"SpecMD Table 1, {source}", predictor=predictor)


def _activeevict(source: str, eviction: str = "importance", **changes: str) -> Preset:
    chosen = {"prefetch": "none", "pre_eviction": "gap", "routing": "budget", "scope": "layer"} | changes
    return Preset(policies=Policies(eviction=eviction, **chosen), source=source)


PRESETS: dict[str, Preset] = {
    "on_demand": Preset(
        policies=Policies(eviction="lru", prefetch="none"), predictor=None, source="baseline: lru without forecasts"
    ),
    "moe_offloading": Preset(
        policies=Policies(eviction="lru", scope="layer"), source="Eliseev and Mazur (2023), lru per layer"
    ),
    "moe_apex": Preset(
        policies=Policies(eviction="lru", prefetch="top_k:overfetch=1.5", scope="layer"),
        source="MoE-APEX, 1.5 K experts per token; the paper states no number",
    ),
    "zero_infinity": Preset(
        policies=Policies(eviction="fifo", prefetch=f"top_k:overfetch={MAX_OVERFETCH}"),
        source="ZeRO-Infinity, all experts of the next layer whatever its router chooses",
    ),
    "specmd_1": _specmd("Eliseev and Mazur (2023)", Policies(eviction="lru")),
    "specmd_2": _specmd("Zhu et al. (2025)", Policies(eviction="score", prefetch="percentile", miss="substitute")),
    "specmd_3": _specmd("HOBBIT (2024)", Policies(eviction="lhu", miss="cascade")),
    "specmd_4": _specmd(
        "Skliar et al. (2025)", Policies(eviction="lru", prefetch="none", routing="cache_aware"), predictor=None
    ),
    "specmd_5": _specmd("Least-Stale", Policies(eviction="least_stale", prefetch="percentile")),
    "activeevict": _activeevict("ActiveEvict, eq. 8 to 21"),
    "activeevict_prediction_only": _activeevict("ActiveEvict ablation, forecast alone", "importance:alpha=0.0"),
    "activeevict_hotness_only": _activeevict("ActiveEvict ablation, past use alone", "importance:alpha=1.0"),
    "activeevict_lru": _activeevict("ActiveEvict ablation, lru eviction", "lru"),
    "activeevict_fixed_top_k": _activeevict("ActiveEvict ablation, no routing budget", routing="standard"),
}
