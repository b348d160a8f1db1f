"""The online model of next uses: it learns, is deterministic, and has constant memory."""

from __future__ import annotations

import itertools
import pickle
import random
from pathlib import Path

import numpy as np
import pytest

from expertcast.data.routing_file import Routing, read_routing
from expertcast.runtime.policies import EVICTION, CacheShape
from expertcast.runtime.policies.eviction import HALF_LIVES, NextUse, UsageModel
from expertcast.runtime.simulation.byte_cache import forwards_of, replay

REAL = Path(__file__).resolve().parents[3] / "benchmarks" / "routing" / "gpt-oss-120b-k2.parquet"


def hits(routing: Routing, policy: str, capacity: float = 0.2) -> float:
    sizes_LE = routing.sized(1)
    memory = int(capacity * int(sizes_LE.sum()))
    choice = EVICTION.choose(policy)
    return replay(forwards_of(routing), choice, bytes_LE=sizes_LE, top_k=routing.top_k, memory=memory).decode.hits


def made(seed: int, tokens: int, *, cycle: bool) -> Routing:
    """3 layers of 16 experts, 2 per token: a cycle of 8 tokens, or drawn from a fixed skew."""
    choose = random.Random(seed)
    share = [1 / (1 + expert) for expert in range(16)]

    def draw() -> list[int]:
        found: list[int] = []
        while len(found) < 2:
            (expert,) = choose.choices(range(16), share)
            found += [expert] if expert not in found else []
        return found

    ids = [
        [[(2 * token + layer) % 16, (2 * token + layer + 1) % 16] if cycle else draw() for layer in range(3)]
        for token in range(tokens)
    ]
    return Routing(source="made", ids_TLK=np.array(ids), prompt_T=np.arange(tokens) < 8, experts=16)


def test_it_closes_some_of_the_gap_on_real_routing() -> None:
    """More hits than every classic policy over all experts; the figures are in benchmarks/forecasts.md."""
    routing = read_routing(REAL)
    found = {policy: hits(routing, policy) for policy in ("lru", "lfu", "lrfu", "importance", "next_use", "belady")}
    assert found["next_use"] > max(found[policy] for policy in ("lru", "lfu", "lrfu", "importance")) + 0.01
    assert found["next_use"] < found["belady"]


def test_what_follows_what_is_learnt() -> None:
    """In a cycle the expert used last returns last: LRU fails, the model of successors does not."""
    routing = made(0, 200, cycle=True)
    assert hits(routing, "next_use", 0.5) > hits(routing, "lru", 0.5) + 0.2


def test_it_is_not_worse_than_frequency_where_that_is_all_there_is() -> None:
    routing = made(1, 400, cycle=False)
    best = max(hits(routing, policy, 0.3) for policy in ("lru", "lfu", "lrfu"))
    assert hits(routing, "next_use", 0.3) > best - 0.02


def test_deterministic() -> None:
    routing = made(2, 60, cycle=False)
    one, other = (_fed(routing) for _ in range(2))
    assert one._score_RE.tolist() == other._score_RE.tolist()


def _fed(routing: Routing, times: int = 1) -> NextUse:
    policy = EVICTION.choose("next_use").make(CacheShape(layers=3, experts=16, top_k=2, slots=12))
    assert isinstance(policy, NextUse)
    for _ in range(times):
        for step in routing.steps():
            policy.start_pass(step.fresh)
            for layer, rows in enumerate(step.rows):
                policy.start_layer(layer, sorted({layer * 16 + expert for row in rows for expert in row}))
    return policy


def test_what_it_keeps_does_not_grow() -> None:
    routing = made(3, 80, cycle=False)
    sizes = [len(pickle.dumps(_fed(routing, times).__dict__ | {"config": None, "shape": None})) for times in (2, 8)]
    assert sizes[1] < 1.1 * sizes[0]


def _features(model: UsageModel, layer: int) -> np.ndarray:
    """The features of a layer's experts before its next visit [F, E]."""
    return model._x[model._visits_R[layer] % len(model._x), layer]


def test_features_by_a_loop() -> None:
    """Averages, share, what followed and age, from the list of each layer's visits; one layer misses some visits."""
    choose = random.Random(6)
    model = UsageModel(layers=3, experts=5, top_k=2, horizon=3, prior=3.0)
    visits: dict[int, list[list[int]]] = {0: [], 1: [], 2: []}
    for number in range(30):
        layers = [0, 1, 2] if number % 3 else [0, 2]
        found = [choose.sample(range(5), choose.randint(1, 3)) for _ in layers]
        model.visit(layers, found)
        for layer, experts in zip(layers, found, strict=True):
            visits[layer].append(experts)
    for layer, expert in itertools.product(range(3), range(5)):
        x_F, own = _features(model, layer)[:, expert], visits[layer]
        used = [expert in experts for experts in own]
        now, share = len(own), 2 / 5
        assert x_F[0] == 1
        for place, half in enumerate(HALF_LIVES, start=1):
            weights = [0.5 ** ((now - 1 - time) / half) for time in range(now)]
            mean = (sum(w for w, u in zip(weights, used, strict=True) if u) + share) / (sum(weights) + 1)
            assert x_F[place] == pytest.approx(np.log(mean / share), rel=1e-4, abs=1e-5)
        rate = (sum(used) + share) / (now + 1)
        assert x_F[-5] == pytest.approx(np.log(rate / share), rel=1e-4, abs=1e-5)
        shares = []
        for before in own[-1]:
            times = sum(before in experts for experts in own[:-1])
            then = sum(before in one and expert in other for one, other in itertools.pairwise(own))
            shares.append((then / rate + 4) / (times + 4))
        assert x_F[-4] == pytest.approx(np.log(np.mean(shares)), rel=1e-4, abs=1e-5)
        age = used[::-1].index(True)
        assert x_F[-3:] == pytest.approx([np.log1p(age) - 2, float(age == 0), 0])


def test_weights_are_those_of_the_newton_steps() -> None:
    """One step for all layers of a visit, on features from before it; the future has no influence."""
    choose = random.Random(7)
    visits = [[choose.sample(range(6), 2) for _ in range(2)] for _ in range(12)]
    model = UsageModel(layers=2, experts=6, top_k=2, horizon=2, prior=3.0)
    count = len(_features(model, 0))
    weights, precision, before = np.zeros(count), np.eye(count) * 3.0, []
    weights[:2] = np.log(0.5), 1.0
    for number, experts in enumerate(visits):
        before.append([_features(model, layer).astype(float) for layer in range(2)])
        odds_LE = model.visit([0, 1], experts)
        if number >= 1:
            gradient = np.zeros(count)
            for layer, expert in itertools.product(range(2), range(6)):
                x_F = before[number - 1][layer][:, expert]
                chance = 1 / (1 + np.exp(-weights @ x_F))
                precision = precision + chance * (1 - chance) * np.outer(x_F, x_F)
                gradient += x_F * ((expert in visits[number - 1][layer] or expert in experts[layer]) - chance)
            weights = weights + np.linalg.inv(precision) @ gradient
        for layer in range(2):
            assert odds_LE[layer] == pytest.approx(weights @ _features(model, layer), rel=1e-3, abs=1e-4)


def test_an_expert_that_was_never_used_is_marked() -> None:
    model = UsageModel(layers=1, experts=5, top_k=2, horizon=2, prior=3.0)
    assert _features(model, 0)[-1].tolist() == [1, 1, 1, 1, 1]
    model.visit([0], [[0, 3]])
    assert _features(model, 0)[-1].tolist() == [0, 1, 1, 0, 1]


def test_experts_of_layers_that_are_not_scored_yet_stay() -> None:
    """Sixteen layers are scored two at a time: what the first of two used is evicted last until then."""
    policy = EVICTION.choose("next_use").make(CacheShape(layers=16, experts=4, top_k=1, slots=3))
    policy.start_pass(True)
    for layer in range(2):
        policy.start_layer(layer, [4 * layer])
        policy.insert(4 * layer)
    policy.start_layer(2, [8])
    policy.insert(8)
    order = []
    while (key := policy.victim({*order})) is not None:
        order.append(key)
    assert sorted(order[:2]) == [0, 4]
    assert order[2:] == [8]
