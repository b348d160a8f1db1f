"""Policies for eviction, prefetch, misses, routing and pre-eviction.

:class:`Policies` selects one of each kind; a preset selects the five policies of a published system by name.
"""

from expertcast.runtime.policies.base import CacheShape, Choice, PolicyConfig
from expertcast.runtime.policies.eviction import LRU, PRE_EVICTION, Eviction, EvictionPolicy, PreEviction
from expertcast.runtime.policies.miss import MISS, Fetch, MissPolicy
from expertcast.runtime.policies.prefetch import PREFETCH, PrefetchPolicy, TopK
from expertcast.runtime.policies.routing import ROUTING, RoutingPolicy, Standard
from expertcast.runtime.policies.settings import EVICTION, PRESETS, Policies

__all__ = [
    "EVICTION",
    "LRU",
    "MISS",
    "PREFETCH",
    "PRESETS",
    "PRE_EVICTION",
    "ROUTING",
    "CacheShape",
    "Choice",
    "Eviction",
    "EvictionPolicy",
    "Fetch",
    "MissPolicy",
    "Policies",
    "PolicyConfig",
    "PreEviction",
    "PrefetchPolicy",
    "RoutingPolicy",
    "Standard",
    "TopK",
]
