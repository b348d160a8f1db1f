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
from expertcast.runtime.policies.eviction import LayerUse, NextUse, UsageModel
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
    found = {policy: hits(routing, policy) for policy in ("lru", "lfu", "lfru", "importance", "next_use", "belady")}
    assert found["next_use"] > max(found[policy] for policy in ("lru", "lfu", "lfru", "importance")) + 0.01
    assert found["next_use"] < found["belady"]


def test_what_follows_what_is_learnt() -> None:
    """In a cycle the expert used last returns last: LRU fails, the model of successors does not."""
    routing = made(0, 200, cycle=True)
    assert hits(routing, "next_use", 0.5) > hits(routing, "lru", 0.5) + 0.2


def test_it_is_not_worse_than_frequency_where_that_is_all_there_is() -> None:
    routing = made(1, 400, cycle=False)
    best = max(hits(routing, policy, 0.3) for policy in ("lru", "lfu", "lfru"))
    assert hits(routing, "next_use", 0.3) > best - 0.02


def test_deterministic() -> None:
    routing = made(2, 60, cycle=False)
    one, other = (_fed(routing) for _ in range(2))
    for layer in range(3):
        assert one._score(layer) == other._score(layer)


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


def test_features_by_a_loop() -> None:
    """Averages, share, age and what followed, from the list of visits."""
    choose = random.Random(6)
    visits = [choose.sample(range(5), 2) for _ in range(30)]
    use = LayerUse(5, 2)
    for experts in visits:
        use.visit(experts)
    x_FE = use.features()
    now, share = len(visits), 2 / 5
    for expert in range(5):
        used = [expert in experts for experts in visits]
        for place, half in enumerate((8, 1, 2, 4, 16, 32, 64), start=1):
            weights = [0.5 ** ((now - 1 - time) / half) for time in range(now)]
            mean = (sum(w for w, u in zip(weights, used, strict=True) if u) + share) / (sum(weights) + 1)
            assert x_FE[place, expert] == pytest.approx(np.log(mean / share))
        rate = (sum(used) + share) / (now + 1)
        assert x_FE[8, expert] == pytest.approx(np.log(rate / share))
        age = used[::-1].index(True)
        assert x_FE[9, expert] == pytest.approx(np.log1p(age) - 2)
        assert x_FE[10, expert] == (age == 0)
        shares = []
        for before in visits[-1]:
            times = sum(before in experts for experts in visits[:-1])
            then = sum(before in one and expert in other for one, other in itertools.pairwise(visits))
            shares.append((then / rate + 4) / (times + 4))
        assert x_FE[12, expert] == pytest.approx(np.log(np.mean(shares)))


def test_weights_are_those_of_the_newton_steps() -> None:
    """One step per visit on features from before it; the future has no influence."""
    choose = random.Random(7)
    visits = [choose.sample(range(6), 2) for _ in range(12)]
    model, use = UsageModel(experts=6, top_k=2, horizon=2, prior=3.0), LayerUse(6, 2)
    weights, precision, before = np.zeros(13), np.eye(13) * 3.0, []
    weights[:2] = np.log(0.5), 1.0
    for number, experts in enumerate(visits):
        before.append(use.features())
        if number >= 1:
            x_FE = before[number - 1]
            chance_E = 1 / (1 + np.exp(-weights @ x_FE))
            label_E = np.array([float(e in visits[number - 1] or e in experts) for e in range(6)])
            for expert in range(6):
                x_F = x_FE[:, expert]
                precision = precision + chance_E[expert] * (1 - chance_E[expert]) * np.outer(x_F, x_F)
            weights = weights + np.linalg.inv(precision) @ (x_FE @ (label_E - chance_E))
        use.visit(experts)
        model.visit(0, experts)
    assert model.log_odds(0) == pytest.approx(weights @ use.features())


def test_an_expert_that_was_never_used_is_marked() -> None:
    use = LayerUse(5, 2)
    use.visit([0, 3])
    assert use.features()[11].tolist() == [0, 1, 1, 0, 1]
