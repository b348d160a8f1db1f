"""Routing made by hand, what is recorded of real models, and recorded routing through pools."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from expertcast.data.routing_file import Routing, read_routing
from expertcast.runtime.pools.cache import PoolCache
from expertcast.runtime.pools.states import Costs, ExpertBytes, State

RECORDED = Path(__file__).resolve().parents[3] / "benchmarks" / "routing"


def recorded(name: str) -> Routing:
    return read_routing(RECORDED / f"{name}.parquet")


def routing(ids: list[list[list[int]]], *, experts: int, prompt: int = 0) -> Routing:
    """
    Args:
        ids: [T][L][K]
    """
    return Routing(source="made", ids_TLK=np.array(ids), prompt_T=np.arange(len(ids)) < prompt, experts=experts)


def skewed(choose: random.Random, *, tokens: int, layers: int, experts: int, top_k: int) -> Routing:
    """Low experts more often, and the last token's again and again."""
    ids: list[list[list[int]]] = []
    for _ in range(tokens):
        token = []
        for layer in range(layers):
            chosen = set(choose.sample(ids[-1][layer], choose.randint(0, top_k - 1))) if ids else set()
            while len(chosen) < top_k:
                chosen.add(min(int(choose.expovariate(4 / experts)), experts - 1))
            token.append(sorted(chosen))
        ids.append(token)
    return routing(ids, experts=experts)


Found = tuple[int, ...]
"""Number of experts of a step that were found in each state, in the order of :class:`State`."""


def replay_pools(routing: Routing, *, size: ExpertBytes, memory: Mapping[State, int]) -> Counter[Found]:
    """Count the states in which layers of decoded tokens found their experts. Prompts use the pools uncounted.

    Args:
        memory: bytes of each pool of one layer.
    """
    caches = [PoolCache(routing.experts, size=size, memory=memory) for _ in range(routing.layers)]
    found: Counter[Found] = Counter()
    for step in routing.steps():
        for cache, rows in zip(caches, step.rows, strict=True):
            used = sorted({expert for row in rows for expert in row})
            if not step.fresh:
                states = Counter(map(cache.state, used))
                found[tuple(states[state] for state in State)] += 1
            cache.use(used)
    return found


def makespan(states: Sequence[State], costs: Costs) -> float:
    """Return the seconds until all experts are ready, with one disk and L decoding threads.

    The disk reads one expert after another without a pause, shards before the plane. A free thread takes any shard that
    has been read (ZipMoE, appendix A).

    Args:
        states: states of the layer's experts, in the order of their reads.
        costs: seconds per operation.
    """
    clock, arrivals = 0.0, list[float]()
    for state in states:
        for _ in range(costs.shards if state is not State.F else 0):
            absent = state in (State.S, State.M)
            clock += costs.shard_s * absent
            arrivals.append(clock if absent else 0.0)
        clock += costs.read_s * (state in (State.E, State.M))
    free = [0.0] * costs.threads
    for arrival in sorted(arrivals):
        heapq.heapreplace(free, max(free[0], arrival) + costs.decode_s)
    return max(clock, *free)


def mean_makespan(found: Mapping[Found, int], costs: Costs) -> float:
    """Mean seconds until a layer's experts are ready, those that leave least to read first."""
    total = 0.0
    for counts, times in found.items():
        states = [state for state, count in zip(State, counts, strict=True) for _ in range(count)]
        total += times * makespan(states, costs)
    return total / sum(found.values())
