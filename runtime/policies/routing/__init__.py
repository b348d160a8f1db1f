"""Routing policies. Every registration is here; the order is the order of tables."""

from expertcast.runtime.policies.registry import PolicyRegistry
from expertcast.runtime.policies.routing.base import Routed, RoutingPolicy
from expertcast.runtime.policies.routing.budget import Budget, BudgetConfig
from expertcast.runtime.policies.routing.cache_aware import CacheAware, CacheAwareConfig
from expertcast.runtime.policies.routing.standard import Standard

ROUTING: PolicyRegistry[RoutingPolicy] = PolicyRegistry("routing policy")
ROUTING.register(Standard)
ROUTING.register(CacheAware)
ROUTING.register(Budget)

__all__ = [
    "ROUTING",
    "Budget",
    "BudgetConfig",
    "CacheAware",
    "CacheAwareConfig",
    "Routed",
    "RoutingPolicy",
    "Standard",
]
