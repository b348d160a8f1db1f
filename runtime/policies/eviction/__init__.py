"""Eviction policies. Every registration is here; the order is the order of tables."""

from expertcast.runtime.policies.eviction.base import EvictionPolicy
from expertcast.runtime.policies.eviction.belady import Belady, bypass_misses
from expertcast.runtime.policies.eviction.fifo import FIFO
from expertcast.runtime.policies.eviction.fld import FLD
from expertcast.runtime.policies.eviction.forecast import ForecastEviction
from expertcast.runtime.policies.eviction.importance import Importance
from expertcast.runtime.policies.eviction.least_stale import LeastStale
from expertcast.runtime.policies.eviction.lfru import LFRU
from expertcast.runtime.policies.eviction.lfu import LFU
from expertcast.runtime.policies.eviction.lhu import LHU
from expertcast.runtime.policies.eviction.lru import LRU
from expertcast.runtime.policies.eviction.marking import Marking
from expertcast.runtime.policies.eviction.next_use import NextUse
from expertcast.runtime.policies.eviction.score import Score
from expertcast.runtime.policies.registry import PolicyRegistry

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

__all__ = ["EVICTION", "LRU", "Belady", "EvictionPolicy", "bypass_misses"]
