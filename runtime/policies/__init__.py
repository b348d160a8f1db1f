"""What to keep, load and drop: policies of five kinds, chosen together by :class:`Policies` or by a preset's name."""

from expertcast.runtime.policies.eviction import EVICTION, LRU, EvictionPolicy
from expertcast.runtime.policies.miss import MISS, Fetch, MissPolicy
from expertcast.runtime.policies.pre_eviction import PRE_EVICTION, PreEviction
from expertcast.runtime.policies.prefetch import PREFETCH, PrefetchPolicy, TopK
from expertcast.runtime.policies.presets import PRESETS
from expertcast.runtime.policies.registry import CacheShape, Choice, PolicyConfig
from expertcast.runtime.policies.routing import ROUTING, RoutingPolicy, Standard
from expertcast.runtime.policies.scope import Eviction
from expertcast.runtime.policies.settings import Policies

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
