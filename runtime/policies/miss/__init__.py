"""Miss policies. Every registration is here; the order is the order of tables."""

from expertcast.runtime.policies.miss.base import Lookup, MissPolicy, Verdict
from expertcast.runtime.policies.miss.cascade import Cascade, CascadeConfig
from expertcast.runtime.policies.miss.drop import Drop, DropConfig
from expertcast.runtime.policies.miss.drop_cascade import DropCascade, DropCascadeConfig
from expertcast.runtime.policies.miss.fetch import Fetch
from expertcast.runtime.policies.miss.fetch_lowest import FetchLowest, FetchLowestConfig
from expertcast.runtime.policies.miss.fetch_priority import FetchPriority, FetchPriorityConfig
from expertcast.runtime.policies.miss.substitute import Substitute, SubstituteConfig
from expertcast.runtime.policies.registry import PolicyRegistry

MISS: PolicyRegistry[MissPolicy] = PolicyRegistry("miss policy")
MISS.register(Fetch)
MISS.register(FetchLowest)
MISS.register(FetchPriority)
MISS.register(Cascade)
MISS.register(Drop)
MISS.register(DropCascade)
MISS.register(Substitute)

__all__ = [
    "MISS",
    "Cascade",
    "CascadeConfig",
    "Drop",
    "DropCascade",
    "DropCascadeConfig",
    "DropConfig",
    "Fetch",
    "FetchLowest",
    "FetchLowestConfig",
    "FetchPriority",
    "FetchPriorityConfig",
    "Lookup",
    "MissPolicy",
    "Substitute",
    "SubstituteConfig",
    "Verdict",
]
