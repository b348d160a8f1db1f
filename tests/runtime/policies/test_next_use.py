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
    return model._x[model._now % len(model._x), :, layer]


def _visits(choose: random.Random, number: int, layers: int, experts: int) -> list[list[list[int]]]:
    """Visits of all layers with 1 to 3 experts each."""
    return [[choose.sample(range(experts), choose.randint(1, 3)) for _ in range(layers)] for _ in range(number)]


@pytest.mark.parametrize("number", [2, 3, 30, 600])
def test_features_by_a_loop(number: int) -> None:
    """Averages, what followed these experts and alike visits, from the list of visits; 600 exceed the memory."""
    model = UsageModel(layers=3, experts=5, top_k=3, horizon=3, prior=3.0)
    visits = _visits(random.Random(6), number, 3, 5)
    for found in visits:
        model.visit(0, found[:2])
        model.visit(2, found[2:])
        model.end_pass(1)
    likes = [_likes(visits, part) for part in ((0, 1), (2,))]
    for layer, expert in itertools.product(range(3), range(5)):
        x_F, own = _features(model, layer)[:, expert], [found[layer] for found in visits]
        used = [expert in experts for experts in own]
        now, share = len(own), 3 / 5
        assert x_F[0] == 1
        for place, half in enumerate(HALF_LIVES, start=1):
            weights = [0.5 ** ((now - 1 - time) / half) for time in range(now)]
            mean = (sum(w for w, u in zip(weights, used, strict=True) if u) + share) / (sum(weights) + 1)
            assert x_F[place] == pytest.approx(np.log(mean / share), rel=1e-3, abs=1e-4)
        rate = mean / share
        ratios = [1.0] * (3 - len(own[-1]))
        for before in own[-1]:
            times = sum(before in experts for experts in own[:-1])
            then = sum(before in one and expert in other for one, other in itertools.pairwise(own))
            ratios.append((then / (rate * share) + 4) / (times + 4))
        assert x_F[-3] == pytest.approx(np.log(np.mean(ratios)), rel=1e-3, abs=1e-4)
        after = {
            time: sum(0.8 ** (lag - 1) * likes[layer // 2].get(time - lag, 0.0) for lag in range(1, 5))
            for time in range(max(0, now - 256), now - 1)
        }
        found = sum(weight * used[time] for time, weight in after.items()) / (rate * share) / sum(after.values() or [1])
        alike = np.log((found + 0.1) / 1.1) if now > 3 else 0
        assert x_F[-2] == pytest.approx(alike, rel=1e-2, abs=1e-3)
        assert x_F[-1] == (not any(used))


def _likes(visits: list[list[list[int]]], part: tuple[int, ...]) -> dict[int, float]:
    """Weight of each visit before the last but one as seen from the last, after some of its layers ran."""
    last, shared = len(visits) - 1, dict[int, float]()
    for now, found in enumerate(visits):
        shared = {time: shared.get(time - 1, 0.0) for time in range(max(-1, now - 256), now)}
        for layers in ((0, 1), (2,)):
            for time in shared:
                past = visits[time] if time >= 0 else [[]] * 3
                both = sum(len({*found[layer]} & {*past[layer]}) for layer in layers)
                shared[time] = shared[time] * (1 - len(layers) / 3) + both
            if now == last and layers == part:
                return {time: np.exp(2 / 3 * (value - max(shared.values()))) for time, value in shared.items()}
    raise AssertionError


def test_weights_are_those_of_the_newton_steps() -> None:
    """One step per pass for all its layers, on features from before it; the future has no influence."""
    visits = [[experts[:2] for experts in found] for found in _visits(random.Random(7), 12, 2, 6)]
    model = UsageModel(layers=2, experts=6, top_k=2, horizon=2, prior=3.0)
    count = len(_features(model, 0))
    weights, precision, before = np.zeros(count), np.eye(count) * 3.0, []
    weights[:2] = np.log(0.5), 1.0
    for number, experts in enumerate(visits):
        before.append([_features(model, layer).astype(float) for layer in range(2)])
        odds_LE = model.visit(0, experts)
        model.learn(slice(2))
        model.end_pass(1)
        for layer in range(2):
            assert odds_LE[layer] == pytest.approx(weights @ _features(model, layer), rel=1e-3, abs=1e-4)
        if number >= 1:
            gradient = np.zeros(count)
            for layer, expert in itertools.product(range(2), range(6)):
                x_F = before[number - 1][layer][:, expert]
                chance = 1 / (1 + np.exp(-weights @ x_F))
                precision = precision + chance * (1 - chance) * np.outer(x_F, x_F)
                gradient += x_F * ((expert in visits[number - 1][layer] or expert in experts[layer]) - chance)
            weights = weights + np.linalg.inv(precision) @ gradient


def test_a_step_of_several_sequences_and_a_layer_without_experts() -> None:
    """More experts than one token has, or none: all are counted as used, and every feature is finite."""
    model = UsageModel(layers=2, experts=6, top_k=2, horizon=2, prior=3.0)
    for _ in range(9):
        odds_LE = model.visit(0, [[5, 0, 1, 2, 3], []])
        model.learn(slice(2))
        model.end_pass(1)
    assert np.isfinite(odds_LE).all()
    assert min(odds_LE[0, [0, 1, 2, 3, 5]]) > max(odds_LE[1].max(), odds_LE[0, 4])


def test_a_layer_that_runs_for_the_last_token_of_a_prompt_only() -> None:
    """Its only visit is the last one of the pass, beside the last ones of the other layers."""
    policy = EVICTION.choose("next_use").make(CacheShape(layers=3, experts=4, top_k=1, slots=3))
    assert isinstance(policy, NextUse)
    policy.start_pass(True)
    for layer, rows in enumerate(([[0], [1], [2]], [[1], [2], [3]], [[3]])):
        policy.see_routing(layer, rows)
        policy.start_layer(layer, [4 * layer + expert for (expert,) in rows])
    policy.start_pass(False)
    assert policy._model._now == 3
    assert policy._model._past_TRK[1:4, :, 0].tolist() == [[0, 6, 14], [1, 7, 14], [2, 8, 13]]


def test_layers_have_their_own_numbers_whichever_is_filled_first() -> None:
    policy = EVICTION.choose("next_use").make(CacheShape(layers=4, experts=2, top_k=1, slots=4))
    part = EVICTION.choose("next_use").make(CacheShape(layers=4, experts=2, top_k=1, slots=2, sharing=2))
    for one, layers in ((policy, (3, 0, 2, 1)), (part, (3, 1))):
        for layer in layers:
            one.insert(2 * layer)
        for _ in range(3):
            one.start_pass(False)
            for layer in sorted(layers):
                one.start_layer(layer, [2 * layer])
        order: list[int] = []
        while (key := one.victim({*order})) is not None:
            order.append(key)
        assert sorted(order) == sorted(2 * layer for layer in layers)


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
