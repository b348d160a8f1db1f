"""The replay by bytes: published figures of two real models, brute force on small ones, and the simulator's counts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from expertcast.data.routing_file import Routing, read_routing
from expertcast.predictors import ExpertcastError
from expertcast.runtime.plan import missing
from expertcast.runtime.policies import EVICTION, Policies
from expertcast.runtime.simulation.byte_cache import Replayed, forwards_of, replay
from tests.runtime.policies.references import ORDERS, History
from tests.runtime.simulation import made

ROUTING = Path(__file__).resolve().parents[3] / "benchmarks" / "routing"
COLUMNS = (("belady", "global"), ("lru", "global"), ("lfu", "global"), ("lfu", "layer"))
PUBLISHED = {
    ("qwen3-30b-a3b-k6", 1000): (62.7, 37.7, 40.2, 45.1),
    ("qwen3-30b-a3b-k6", 2000): (79.4, 56.5, 58.6, 63.3),
    ("qwen3-30b-a3b-k6", 3000): (87.8, 70.6, 71.3, 74.2),
    ("qwen3-30b-a3b-k6", 4000): (92.7, 80.3, 80.8, 81.7),
    ("gpt-oss-120b-k2", 1000): (43.5, 17.7, 23.3, 19.1),
    ("gpt-oss-120b-k2", 3000): (67.8, 44.8, 43.6, 44.5),
    ("gpt-oss-120b-k2", 6000): (81.0, 59.5, 59.7, 61.8),
}
"""Decode hits in % by MiB, of BigMoeOnEdge's replay (docs/bench-data/2026-07-20-cache-replay)."""


def run(routing: Routing, policy: str, memory: int, scope: str = "global") -> Replayed:
    return replay(
        forwards_of(routing),
        EVICTION.choose(policy),
        bytes_LE=routing.sized(1),
        top_k=routing.top_k,
        memory=memory,
        scope=scope,
    )


@pytest.mark.parametrize(("name", "mib"), PUBLISHED)
def test_the_published_replay(name: str, mib: int) -> None:
    routing = read_routing(ROUTING / f"{name}.parquet")
    found = [100 * run(routing, policy, mib * 2**20, scope).decode.hits for policy, scope in COLUMNS]
    assert found == pytest.approx(PUBLISHED[name, mib], abs=0.0501)


@pytest.mark.parametrize("share", [0.10, 0.14, 0.18, 0.25, 0.30])
def test_a_plans_reads_follow_recorded_routing(share: float) -> None:
    routing = read_routing(ROUTING / "qwen3-30b-a3b-k6.parquet")
    slots = round(share * routing.layers * routing.experts)
    found = run(replace(routing, bytes_LE=None), "lrfu", slots).decode
    assert 1 - found.hits == pytest.approx(missing(share, routing.experts), rel=0.2)


def small(choose: random.Random, *, sizes: Sequence[int] = (1,), tokens: int = 6) -> Routing:
    """Routing that brute force can deal with."""
    layers, experts = choose.randint(1, 3), choose.randint(2, 4)
    top_k = choose.randint(1, min(2, experts - 1))
    ids = [[choose.sample(range(experts), top_k) for _ in range(layers)] for _ in range(tokens)]
    size_LE = [[choose.choice(sizes) for _ in range(experts)] for _ in range(layers)]
    prompt = choose.randint(0, 2)
    return Routing(
        source="made",
        ids_TLK=np.array(ids),
        prompt_T=np.arange(tokens) < prompt,
        experts=experts,
        bytes_LE=np.array(size_LE),
    )


def events_of(routing: Routing) -> list[list[int]]:
    """Keys of each event, by a loop over tokens."""
    prompt = [token for token in range(len(routing.prompt_T)) if routing.prompt_T[token]]
    decoded = [[token] for token in range(len(routing.prompt_T)) if not routing.prompt_T[token]]
    events = []
    for tokens in ([prompt] if prompt else []) + decoded:
        for layer in range(routing.layers):
            used = [layer * routing.experts + int(e) for token in tokens for e in routing.ids_TLK[token, layer]]
            events.append([key for place, key in enumerate(used) if key not in used[place + 1 :]])
    return events


@pytest.mark.parametrize("policy", ["lru", "lfu", "least_stale", "belady"])
def test_a_cache_in_bytes_against_its_slowest_form(policy: str) -> None:
    """Experts of 1 to 3 bytes: what is missed and moved is that of a list of residents, sorted at each decision."""
    choose, moved = random.Random(3), 0
    for _ in range(150):
        routing = small(choose, sizes=(1, 2, 3), tokens=8)
        size = routing.sized(None).ravel().tolist()
        least = max(size) * routing.top_k
        memory = choose.randint(least, max(least, sum(size)))
        events = events_of(routing)
        history = History(layers=routing.layers, experts=routing.experts, events=events)
        misses = bytes_moved = 0
        for number, keys in enumerate(events):
            layer = number % routing.layers
            history.forward += layer == 0
            history.start_layer(layer, keys)
            missing = [key for key in keys if key not in history.residents]
            misses, bytes_moved = misses + len(missing), bytes_moved + sum(size[key] for key in missing)
            for key in missing:
                history.insert(key, True)
            history.use(keys)
            while sum(size[key] for key in history.residents) > memory:
                victim = history.victim(ORDERS[policy], keys)
                if victim is None:
                    break
                del history.residents[victim]
        done = run(routing, policy, memory)
        assert done.decode.misses + done.prompt.misses == misses
        assert done.decode.bytes_moved + done.prompt.bytes_moved == bytes_moved
        moved += bytes_moved
    assert moved > 1000


def test_the_runtimes_simulator_counts_the_same_where_slots_are_equal() -> None:
    """Decode steps alone, so that no event is larger than the cache: both call the same policies."""
    trace = made.random_trace(7, tokens=80)
    ids_TLK = np.stack([ids.numpy() for ids in trace.require_routes().ids], axis=1)
    prompt_T = np.arange(80) < 4
    routing = Routing(source="made", ids_TLK=ids_TLK, prompt_T=prompt_T, experts=6)
    for policy in ("lru", "lfu", "lrfu", "importance", "next_use", "belady"):
        for scope, slots in (("global", 12), ("layer", 15)):
            simulated = made.simulate(
                trace, Policies(eviction=policy, scope=scope, prefetch="none"), slots, made.machine(3)
            )
            done = run(routing, policy, slots, scope)
            assert abs(done.decode.misses - simulated.decode.total.misses) <= 2, (policy, scope)


def test_refusals() -> None:
    routing = small(random.Random(0))
    with pytest.raises(ExpertcastError, match="score reads the router's scores"):
        run(routing, "score", 100)
    with pytest.raises(ExpertcastError, match="memory=0 leaves 0 bytes for a layer"):
        run(routing, "lru", 0)
    with pytest.raises(ExpertcastError, match=f"give {routing.layers * routing.top_k} or more"):
        run(routing, "lru", routing.layers * routing.top_k - 1, "layer")
