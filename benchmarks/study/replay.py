"""Replaying a trace access by access, as many cache studies do, against a layer's experts as one event.

A runtime knows all experts of a layer at once: none of them is given up for another one of the same layer. A replay of
single accesses lets a policy do just that and then counts a miss that no runtime has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from expertcast.runtime.policies import EVICTION, CacheShape
from expertcast.runtime.policies.eviction import Eviction
from expertcast.runtime.simulation.trace import Forward, Trace


def replays(trace: Trace, names: Sequence[str], slots: int, scope: str) -> list[dict[str, Any]]:
    """A row per policy: misses of the decode steps by events and by accesses, and how much more the latter are."""
    rows = []
    for name in names:
        together, alone = (count_misses(trace, name, slots, scope, atomic=atomic) for atomic in (True, False))
        inflation = alone / together - 1 if together else None
        rows.append({
            "eviction": name, "scope": scope, "slots": slots, "misses": together, "misses_per_access": alone,
            "inflation": inflation,
        })  # fmt: skip
    return rows


def count_misses(trace: Trace, name: str, slots: int, scope: str, *, atomic: bool) -> int:
    """Misses in decode steps.

    Args:
        atomic: a layer's distinct experts are one event in decode steps, as they are in prefills; else every token's
            every expert is one of its own.
    """
    shape = trace.shape
    cache = CacheShape(layers=shape.layers, experts=shape.experts, top_k=shape.top_k, slots=slots)
    eviction = Eviction(EVICTION.choose(name), cache, scope)
    limits = eviction.shares or [slots] * shape.layers
    held: list[set[int]] = [set() for _ in eviction.policies]
    by_layer = held if eviction.shares is not None else held * shape.layers
    misses = 0
    for forward in trace.forwards:
        eviction.start_pass(forward.fresh)
        for layer, keys in enumerate(forward.keys):
            policy, resident, limit = eviction.by_layer[layer], by_layer[layer], limits[layer]
            for event in _events(trace, forward, layer, keys, limit, atomic or forward.fresh):
                policy.start_layer(layer, event)
                missing = [key for key in event if key not in resident]
                misses += 0 if forward.fresh else len(missing)
                for key in missing:
                    if len(resident) == limit:
                        victim = policy.victim(set(event))
                        assert victim is not None, "an event fits the slots"
                        policy.remove(victim)
                        resident.remove(victim)
                    policy.insert(key)
                    resident.add(key)
                policy.use(event)
    return misses


def _events(
    trace: Trace, forward: Forward, layer: int, keys: list[int], limit: int, atomic: bool
) -> Iterator[list[int]]:
    if atomic:
        yield from (keys[start : start + limit] for start in range(0, len(keys), limit))
        return
    first = layer * trace.shape.experts
    for row in trace.known_routes().ids[layer][forward.rows].tolist():
        yield from ([first + expert] for expert in row)
