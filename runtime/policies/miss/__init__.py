"""Miss policies. Every registration is here; the order is the order of tables."""

from expertcast.runtime.policies.miss.base import Lookup, MissPolicy, Verdict
from expertcast.runtime.policies.miss.cascade import Cascade
from expertcast.runtime.policies.miss.drop import Drop
from expertcast.runtime.policies.miss.drop_cascade import DropCascade
from expertcast.runtime.policies.miss.fetch import Fetch
from expertcast.runtime.policies.miss.fetch_lowest import FetchLowest
from expertcast.runtime.policies.miss.fetch_priority import FetchPriority
from expertcast.runtime.policies.miss.substitute import Substitute
from expertcast.runtime.policies.registry import PolicyRegistry

MISS: PolicyRegistry[MissPolicy] = PolicyRegistry(
    "miss policy", Fetch, FetchLowest, FetchPriority, Cascade, Drop, DropCascade, Substitute
)

__all__ = ["MISS", "Fetch", "Lookup", "MissPolicy", "Verdict"]
