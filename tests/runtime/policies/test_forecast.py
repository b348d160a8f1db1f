"""Evicting by forecast next use: values by hand, the order over time, and perfect forecasts against Belady."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from expertcast.runtime.policies import EVICTION, CacheShape
from expertcast.runtime.policies.forecast import ForecastEviction, endless_value, next_use_value
from tests.runtime.policies.references import Visit, cache, run, step

SURE = 1.0


def made(
    *, layers: int = 2, experts: int = 3, slots: int = 4, discount: float = 0.5, idle_loads: int = 1
) -> ForecastEviction:
    shape = CacheShape(layers=layers, experts=experts, top_k=1, slots=slots)
    policy = EVICTION.choose(f"forecast:discount={discount},memory=4,idle_loads={idle_loads}").make(shape)
    assert isinstance(policy, ForecastEviction)
    return policy


def test_value_of_the_next_use() -> None:
    """One expert with p = 0, 0.5 and then always 0.25; the discount is one half.

    Always: 0.25 / (1 - 0.5 * 0.75) = 0.4. Before: 0.5 + 0.5 * 0.5 * 0.4 = 0.6. Before that: 0 + 1 * 0.5 * 0.6 = 0.3.
    """
    assert endless_value(np.array([0.25, 1.0]), 0.5).tolist() == pytest.approx([0.4, 1.0])
    value_HLE = next_use_value(np.array([0.0, 0.5, 0.25]).reshape(3, 1, 1), 0.5)
    assert value_HLE.flatten().tolist() == pytest.approx([0.3, 0.6, 0.4], abs=1e-6)


def test_sooner_layers_are_worth_more() -> None:
    """Two layers, every expert as likely in every row: who goes is whose layer runs last.

    Before layer 0 has run layer 1 is the later one, then layer 0, then layer 1 again.
    """
    policy = made()
    for key in (0, 1, 3, 4):
        policy.insert(key)
    policy.start_pass(fresh=False)
    policy.see_tokens(torch.full((3, 2, 3), 0.5))
    assert policy.victim(()) in (3, 4)
    policy.start_layer(0, [0])
    assert policy.victim((0,)) == 1
    policy.start_layer(1, [3])
    assert policy.victim(()) in (3, 4)


def test_rows_move_on_with_the_tokens() -> None:
    """Layer 0's expert 0 is forecast for this token, 1 for the next one, 2 for all later ones.

    Once the layer has run, 0 is not expected again; a token later 1 is not either; from then on the last row holds.
    """
    policy = made(layers=1, slots=3)
    for key in (0, 1, 2):
        policy.insert(key)
    policy.start_pass(fresh=False)
    policy.see_tokens(torch.eye(3)[:, None, :])
    assert [policy.worth(key) for key in (0, 1, 2)] == [1, 0, 0]
    assert policy.victim(()) == 2
    policy.start_layer(0, [0])
    assert [policy.worth(key) for key in (0, 1, 2)] == [0, 1, 0]
    assert policy.victim(()) == 0
    for _ in range(3):
        policy.start_pass(fresh=False)
        policy.start_layer(0, [1])
        assert [policy.worth(key) for key in (0, 1, 2)] == [0, 0, 1]
        assert policy.victim((0,)) == 1
    assert policy.victim((0, 1, 2)) is None


def test_without_a_forecast_shares_of_recent_steps_decide() -> None:
    """Shares begin at K / E = 1/3; the n-th step counts 1 / (n + 1), from the third on 1/4.

    Expert 0 in step 1: 1/3 / 2 + 1/2 = 2/3, the others 1/6. Expert 1 in step 2: 1/6 * 2/3 + 1/3 = 4/9, 0: 4/9, 2: 1/9.
    Expert 1 in step 3: 4/9 * 3/4 + 1/4 = 7/12, 0: 1/3, 2: 1/12. New texts drop the forecast and keep the shares.
    """
    policy = made(layers=1)
    for key in (0, 1, 2):
        policy.insert(key)
    for key in (0, 1, 1):
        policy.start_pass(fresh=False)
        policy.start_layer(0, [key])
    shares = pytest.approx([1 / 3, 7 / 12, 1 / 12])
    assert [policy.worth(key) for key in (0, 1, 2)] == shares
    assert policy.victim(()) == 2
    assert policy.victim((2,)) == 0
    policy.see_tokens(torch.tensor([0.0, 0.0, SURE]).expand(2, 1, 3))
    assert policy.victim((0,)) == 1
    policy.start_pass(fresh=True)
    assert [policy.worth(key) for key in (0, 1, 2)] == shares
    assert policy.victim((2,)) == 0


def test_wanted_are_the_best_without_a_slot() -> None:
    """Layer 1 runs next, layer 0 half a token after it, which costs 0.5 ** 0.5 = 0.71 of a value.

    Layer 0's expert 1 (0.4) is worth 0.283 then, layer 1's expert 2 is worth 0.25; expert 0 (0.9) is resident at first.
    """
    for count, first, then in ((0, [], []), (1, [1], [0]), (2, [1, 5], [0, 5]), (10, [1, 5, 2, 3, 4], [0, 5, 2, 3, 4])):
        policy = made(idle_loads=count)
        policy.insert(0)
        policy.start_pass(fresh=False)
        policy.start_layer(0, [0])
        policy.start_layer(1, [3])
        policy.start_pass(fresh=False)
        policy.start_layer(0, [0])
        forecast_HLE = torch.zeros(3, 2, 3)
        forecast_HLE[0, 1, 2] = 0.25
        forecast_HLE[1, 0] = torch.tensor([0.9, 0.4, 0.0])
        policy.see_tokens(forecast_HLE)
        worth = {0: 0.9, 1: 0.4, 5: 0.25}
        assert sorted(policy.wanted()[:2]) == sorted((key, pytest.approx(worth[key])) for key in first[:2])
        assert {key for key, _ in policy.wanted()} == set(first)
        policy.insert(1)
        policy.remove(0)
        assert [key for key, _ in policy.wanted()][:2] == then[:2]
        assert {key for key, _ in policy.wanted()} == set(then)


def test_a_layers_own_policy_wants_its_own_experts() -> None:
    policy = made(idle_loads=9)
    policy.start_pass(fresh=False)
    assert policy.wanted() == []
    policy.start_layer(1, [4])
    assert {key for key, _ in policy.wanted()} == {3, 4, 5}


def test_perfect_forecasts_miss_as_often_as_belady() -> None:
    """Told all that comes, at every layer, it gives up what is needed last: exactly the bound with forced admission."""
    random_ = random.Random(0)
    for _ in range(20):
        layers, experts, top_k = random_.randint(1, 3), random_.randint(3, 6), random_.randint(1, 2)
        slots = random_.randint(top_k + 1, layers * experts)
        needs = [
            [sorted(random_.sample(range(experts), top_k)) for _ in range(layers)]
            for _ in range(random_.randint(4, 20))
        ]
        forwards = [
            [Visit(needs=[layer * experts + expert for expert in chosen]) for layer, chosen in enumerate(token)]
            for token in needs
        ]
        shape = {"layers": layers, "experts": experts, "slots": slots, "top_k": top_k}
        belady = run(cache("belady", **shape), forwards)
        residency = cache("forecast", **shape)
        for token, forward in enumerate(forwards):
            residency.start_pass(fresh=False)
            for layer, visit in enumerate(forward):
                residency.eviction.see_tokens(_truth(needs[token:], experts))
                step(residency, layer, visit)
        assert residency.stats.total.misses == belady.misses


def _truth(needs: Sequence[Sequence[Sequence[int]]], experts: int) -> torch.Tensor:
    """Forecast [H, L, E] of what is needed, nothing after it."""
    truth_HLE = torch.zeros(len(needs) + 1, len(needs[0]), experts)
    for row, token in enumerate(needs):
        for layer, chosen in enumerate(token):
            truth_HLE[row, layer, list(chosen)] = 1.0
    return truth_HLE
