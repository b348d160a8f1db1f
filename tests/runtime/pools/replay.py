"""Recorded routing through pools: what every layer waits for, by the scheduler's own order.

L MoE layers, E routed experts per layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from expertcast.data.routing_file import Routing
from expertcast.runtime.pools.cache import FADE, MARGIN, PoolCache
from expertcast.runtime.pools.schedule import Task, schedule, simulate
from expertcast.runtime.pools.states import Costs, ExpertBytes, State

Found = tuple[int, ...]
"""How many experts of a step were found in each state, in the order of :class:`State`."""


def replay_pools(
    routing: Routing,
    *,
    size: ExpertBytes,
    memory: Mapping[State, int],
    margin: int = MARGIN,
    fade: float = FADE,
) -> Counter[Found]:
    """How often a layer of a decoded token found its experts in which states. Prompts go through the pools uncounted.

    Args:
        routing: what is used.
        size: bytes of an expert's parts.
        memory: bytes of each pool of one layer.
        margin: of :class:`PoolCache`.
        fade: of :class:`PoolCache`.
    """
    caches = [
        PoolCache(routing.experts, size=size, memory=memory, margin=margin, fade=fade) for _ in range(routing.layers)
    ]
    found: Counter[Found] = Counter()
    for step in routing.steps():
        for layer, rows in enumerate(step.rows):
            access = caches[layer].use(sorted({expert for row in rows for expert in row}))
            if not step.fresh:
                states = Counter(access.found.values())
                found[tuple(states[state] for state in State)] += 1
    return found


def mean_makespan(found: Mapping[Found, int], costs: Costs) -> float:
    """Mean seconds until a layer's experts are ready, scheduled as :func:`schedule` does."""
    total = sum(times * ready_s(states, costs) for states, times in found.items())
    return total / sum(found.values())


def ready_s(found: Found, costs: Costs) -> float:
    """Seconds until experts that were found in these states are ready."""
    states = [state for state, count in zip(State, found, strict=True) for _ in range(count)]
    tasks = [Task(expert=expert, state=state) for expert, state in enumerate(states) for _ in range(costs.tensors)]
    return simulate(tasks, schedule(tasks, costs), costs).makespan
