"""Prefetch selections. Every registration is here; the order is the order of tables."""

from expertcast.runtime.policies.prefetch.base import PrefetchPolicy, Transfer, Wanted
from expertcast.runtime.policies.prefetch.none import NoPrefetch
from expertcast.runtime.policies.prefetch.percentile import Percentile
from expertcast.runtime.policies.prefetch.threshold import Threshold
from expertcast.runtime.policies.prefetch.top_k import TopK, TopKConfig
from expertcast.runtime.policies.prefetch.value import Value
from expertcast.runtime.policies.registry import PolicyRegistry

PREFETCH: PolicyRegistry[PrefetchPolicy] = PolicyRegistry(
    "prefetch policy", NoPrefetch, TopK, Percentile, Threshold, Value
)

__all__ = ["PREFETCH", "Percentile", "PrefetchPolicy", "TopK", "TopKConfig", "Transfer", "Value", "Wanted"]
