"""Eviction policies for tests that drive a residency themselves."""

from __future__ import annotations

from expertcast.runtime.policies import EVICTION, CacheShape, Choice, Eviction, EvictionPolicy, PolicyConfig
from expertcast.runtime.storage.layout import Region


def eviction(
    policy: str | type[EvictionPolicy] = "lru",
    *,
    layers: int,
    experts: int,
    slots: int,
    top_k: int = 2,
    scope: str = "global",
    regions: tuple[Region, ...] = (),
) -> Eviction:
    choice = EVICTION.choose(policy) if isinstance(policy, str) else Choice(policy, PolicyConfig())
    shape = CacheShape(layers=layers, experts=experts, top_k=top_k, slots=slots, regions=regions)
    return Eviction(choice, shape, scope)
