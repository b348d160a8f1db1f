"""Eviction policies for tests that drive a residency themselves."""

from __future__ import annotations

from expertcast.runtime.policies import EVICTION, CacheShape, Choice, Eviction, EvictionPolicy, PolicyConfig


def eviction(
    policy: str | type[EvictionPolicy] = "lru",
    *,
    layers: int,
    experts: int,
    slots: int,
    top_k: int = 2,
    scope: str = "global",
) -> Eviction:
    choice = EVICTION.choose(policy) if isinstance(policy, str) else Choice(policy, PolicyConfig())
    return Eviction(choice, CacheShape(layers=layers, experts=experts, top_k=top_k, slots=slots), scope)
