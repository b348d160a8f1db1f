"""Eviction policies. Every registration is here; the order is the order of tables."""

from expertcast.runtime.policies.eviction.base import EvictionPolicy
from expertcast.runtime.policies.eviction.belady import Belady, bypass_misses
from expertcast.runtime.policies.eviction.fld import FLD, FLDConfig
from expertcast.runtime.policies.eviction.forecast import ForecastConfig, ForecastEviction
from expertcast.runtime.policies.eviction.importance import Importance, ImportanceConfig
from expertcast.runtime.policies.eviction.least_stale import LeastStale, LeastStaleConfig
from expertcast.runtime.policies.eviction.lfu import LFU
from expertcast.runtime.policies.eviction.lhu import LHU
from expertcast.runtime.policies.eviction.lru import LRU
from expertcast.runtime.policies.eviction.score import Score
from expertcast.runtime.policies.registry import PolicyRegistry

EVICTION: PolicyRegistry[EvictionPolicy] = PolicyRegistry("eviction policy")
EVICTION.register(LRU)
EVICTION.register(LFU)
EVICTION.register(LHU)
EVICTION.register(FLD)
EVICTION.register(Score)
EVICTION.register(LeastStale)
EVICTION.register(Importance)
EVICTION.register(ForecastEviction)
EVICTION.register(Belady)

__all__ = [
    "EVICTION",
    "FLD",
    "LFU",
    "LHU",
    "LRU",
    "Belady",
    "EvictionPolicy",
    "FLDConfig",
    "ForecastConfig",
    "ForecastEviction",
    "Importance",
    "ImportanceConfig",
    "LeastStale",
    "LeastStaleConfig",
    "Score",
    "bypass_misses",
]
