"""Routing policies. Every registration is here; the order is the order of tables."""

from expertcast.runtime.policies.registry import PolicyRegistry
from expertcast.runtime.policies.routing.base import Routed, RoutingPolicy
from expertcast.runtime.policies.routing.budget import Budget
from expertcast.runtime.policies.routing.cache_aware import CacheAware
from expertcast.runtime.policies.routing.standard import Standard

ROUTING: PolicyRegistry[RoutingPolicy] = PolicyRegistry("routing policy", Standard, CacheAware, Budget)

__all__ = ["ROUTING", "Routed", "RoutingPolicy", "Standard"]
