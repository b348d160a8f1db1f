"""Prefetch selections. Every registration is here; the order is the order of tables."""

from expertcast.runtime.policies.prefetch.base import PrefetchPolicy, Transfer, Wanted
from expertcast.runtime.policies.prefetch.none import NoPrefetch
from expertcast.runtime.policies.prefetch.percentile import Percentile, PercentileConfig
from expertcast.runtime.policies.prefetch.threshold import Threshold, ThresholdConfig
from expertcast.runtime.policies.prefetch.top_k import TopK, TopKConfig
from expertcast.runtime.policies.prefetch.value import Value, ValueConfig
from expertcast.runtime.policies.registry import PolicyRegistry

PREFETCH: PolicyRegistry[PrefetchPolicy] = PolicyRegistry("prefetch policy")
PREFETCH.register(NoPrefetch)
PREFETCH.register(TopK)
PREFETCH.register(Percentile)
PREFETCH.register(Threshold)
PREFETCH.register(Value)

__all__ = [
    "PREFETCH",
    "NoPrefetch",
    "Percentile",
    "PercentileConfig",
    "PrefetchPolicy",
    "Threshold",
    "ThresholdConfig",
    "TopK",
    "TopKConfig",
    "Transfer",
    "Value",
    "ValueConfig",
    "Wanted",
]
