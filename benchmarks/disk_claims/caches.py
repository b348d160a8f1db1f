"""Pools, their planner and plain eviction over recorded routing (rows E12 to E14, E18, E19 and E21)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.disk_claims.replay import Found, mean_makespan, replay_pools
from expertcast.data.routing_file import Routing, read_routing
from expertcast.runtime.policies import EVICTION
from expertcast.runtime.pools.cache import PoolCache
from expertcast.runtime.pools.planner import Plan, plans
from expertcast.runtime.pools.ranks import rank_model
from expertcast.runtime.pools.states import Costs, ExpertBytes, State
from expertcast.runtime.simulation.byte_cache import forwards_of, replay

ROUTING = Path(__file__).resolve().parents[1] / "routing"
RECORDED = ("gpt-oss-120b-k2", "qwen3-30b-a3b-k6")
SHARES = (0.08, 0.15, 0.3)
DISKS = (1.3e9, 5e8, 2e8)
THREADS = (1, 2)
EVICTIONS = ("lru", "fifo", "marking", "lfu", "belady")
SIZE = ExpertBytes(plane=6_300_000, exponents=2_318_400)
"""Of an OLMoE-1B-7B expert."""
DECODE_RATE = 2.5e9
"""Bytes of weights per second and thread."""
_FIRST = 8
"""Of the planner's allocations, those that are replayed before one is chosen."""


class Dropping(PoolCache):
    """As the paper has it: what overflows a pool is gone."""

    def __init__(self, experts: int, *, size: ExpertBytes, memory: Mapping[State, int]) -> None:
        super().__init__(experts, size=size, memory=memory)
        self._used = []  # no pool follows any other


def cached(names: Sequence[str] = RECORDED, *, layers: int = 4, step: float = 0.25) -> dict[str, Any]:
    """A row for each routing, share of memory, disk and number of threads; and hits of each policy.

    Args:
        names: of recorded routing.
        layers: every so many layers are taken.
        step: of the planner's grid.
    """
    planned, evicted, dropped = [], [], []
    for name in names:
        whole = read_routing(ROUTING / f"{name}.parquet")
        routing = replace(whole, ids_TLK=whole.ids_TLK[:, ::layers], bytes_LE=None)
        for share in SHARES:
            memory = int(share * routing.experts * SIZE.held(State.F))
            where = {"routing": name, "share": share, "steps": int((~routing.prompt_T).sum())}
            planned += [{**where, **row} for row in _planned(routing, memory, step)]
            evicted.append({**where, **_evicted(routing, memory)})
            dropped += [{**where, **row} for row in _dropped(routing, memory)]
    return {"layers": layers, "step": step, "planned": planned, "evicted": evicted, "dropped": dropped}


def costs_of(bandwidth: float, threads: int) -> Costs:
    """Of this disk."""
    return Costs(
        read_s=SIZE.plane / bandwidth, ratio=SIZE.exponents / SIZE.plane, decode_s=SIZE.plane / DECODE_RATE, shards=2,
        threads=threads,
    )  # fmt: skip


def _planned(routing: Routing, memory: int, step: float) -> list[dict[str, Any]]:
    """What the planner puts first beside the best of its grid by replay; waits of a layer, seconds."""
    model, counted, rows = rank_model(routing), dict[tuple[int, ...], Counter[Found]](), []
    for bandwidth in DISKS:
        for threads in THREADS:
            costs = costs_of(bandwidth, threads)
            candidates = plans(model, costs, size=SIZE, memory=memory, step=step)
            seconds = [_replayed(routing, plan, costs, counted) for plan in candidates]
            only_full = next(
                wait for plan, wait in zip(candidates, seconds, strict=True)
                if plan.experts[State.F] and not any(plan.experts[state] for state in (State.C, State.S, State.E))
            )  # fmt: skip
            best = min(seconds)
            rows.append(
                {
                    "bandwidth": bandwidth, "threads": threads, "allocations": len(candidates),
                    "first": seconds[0] / best, "of_first_eight": min(seconds[:_FIRST]) / best,
                    "worst": max(seconds) / best, "only_full": only_full / best,
                }
            )  # fmt: skip
    return rows


def _replayed(routing: Routing, plan: Plan, costs: Costs, counted: dict[tuple[int, ...], Counter[Found]]) -> float:
    key = tuple(plan.experts.values())
    if key not in counted:
        counted[key] = replay_pools(routing, size=SIZE, memory=plan.memory)
    return mean_makespan(counted[key], costs)


def _evicted(routing: Routing, memory: int) -> dict[str, Any]:
    """Hits of decoded tokens, all memory in whole experts with a share for each layer; `ranking` is pool F alone."""
    bytes_LE = np.full((routing.layers, routing.experts), SIZE.held(State.F))
    forwards, hits = forwards_of(routing), {}
    for name in EVICTIONS:
        done = replay(
            forwards, EVICTION.choose(name), bytes_LE=bytes_LE, top_k=routing.top_k, memory=memory * routing.layers,
            scope="layer",
        )  # fmt: skip
        hits[name] = done.decode.hits
    found = replay_pools(routing, size=SIZE, memory={State.F: memory})
    total = sum(times * sum(states) for states, times in found.items())
    return {"hits": {**hits, "ranking": sum(times * states[0] for states, times in found.items()) / total}}


def _dropped(routing: Routing, memory: int) -> list[dict[str, Any]]:
    """Half of the memory in F and half in C: what overflows F is dropped, or goes on to C. Beside F or C alone."""
    costs, waits = costs_of(5e8, 2), {}
    both = {State.F: memory // 2, State.C: memory // 2}
    for name, kind, pools in (
        ("dropped", Dropping, both),
        ("passed_on", PoolCache, both),
        ("only_full", PoolCache, {State.F: memory}),
        ("only_compressed", PoolCache, {State.C: memory}),
    ):
        caches = [kind(routing.experts, size=SIZE, memory=pools) for _ in range(routing.layers)]
        waits[name] = mean_makespan(_found(routing, caches), costs)
    return [waits]


def _found(routing: Routing, caches: Sequence[PoolCache]) -> Counter[Found]:
    found: Counter[Found] = Counter()
    for step in routing.steps():
        for cache, rows in zip(caches, step.rows, strict=True):
            access = cache.use(sorted({expert for row in rows for expert in row}))
            if not step.fresh:
                states = Counter(access.found.values())
                found[tuple(states[state] for state in State)] += 1
    return found
