"""Every metric against a loop over tokens that follows its definition word by word."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from expertcast.predictors.base import Forecast, inclusion_probability
from expertcast.predictors.view import ModelShape
from expertcast.training.metrics import BUDGETS, RoutingComparison, RoutingMeans, chance_levels, compare, rank_routing


def random_routing(seed: int, tokens: int, shape: ModelShape, *, biased: bool = False) -> Forecast:
    """Random logits, routed as a sigmoid router would (unsorted ids), with or without a correction bias."""
    generator = torch.Generator().manual_seed(seed)
    logits_TE = torch.randn(tokens, shape.experts, generator=generator)
    bias_E = torch.randn(shape.experts, generator=generator) * biased
    ids_TK = (logits_TE.sigmoid() + bias_E).topk(shape.top_k, dim=1).indices
    ids_TK = ids_TK[:, torch.randperm(shape.top_k, generator=generator)]
    return Forecast(
        layer=1, logits_TE=logits_TE, topk_ids_TK=ids_TK, topk_weights_TK=logits_TE.sigmoid().gather(1, ids_TK)
    )


def near(routing: Forecast, seed: int, noise: float) -> Forecast:
    """A forecast that is right often, so that every metric has hits and misses."""
    generator = torch.Generator().manual_seed(seed)
    logits_TE = routing.logits_TE + noise * torch.randn(routing.logits_TE.shape, generator=generator)
    ids_TK = logits_TE.topk(routing.topk_ids_TK.shape[1], dim=1).indices.flip(1)
    return Forecast(
        layer=1, logits_TE=logits_TE, topk_ids_TK=ids_TK, topk_weights_TK=logits_TE.sigmoid().gather(1, ids_TK)
    )


def comparison_of(forecast: Forecast, truth: Forecast) -> RoutingComparison:
    return compare(forecast, rank_routing(truth))


def scored(shape: ModelShape, *pairs: Forecast) -> dict[str, Tensor]:
    """Mean scores of forecasts and truths, given in turn, as batches of one layer."""
    means = RoutingMeans(shape, 1)
    for forecast, truth in zip(pairs[::2], pairs[1::2], strict=True):
        means.update(0, comparison_of(forecast, truth))
    return means.per_layer()


def by_weight(routing: Forecast, token: int) -> list[int]:
    pairs = zip(routing.topk_weights_TK[token].tolist(), routing.topk_ids_TK[token].tolist(), strict=True)
    return [expert for _, expert in sorted(pairs, reverse=True)]


def candidate_order(forecast: Forecast, token: int) -> list[int]:
    own = by_weight(forecast, token)
    logits = forecast.logits_TE[token].tolist()
    return own + sorted(set(range(len(logits))) - set(own), key=lambda expert: -logits[expert])


def reference_scores(forecast: Forecast, truth: Forecast, shape: ModelShape) -> dict[str, list[float]]:
    """Means over tokens by the definitions."""
    rows: dict[str, list[list[float]]] = {}
    for token in range(len(truth.logits_TE)):
        true, order = by_weight(truth, token), candidate_order(forecast, token)
        predicted, top_k = order[: shape.top_k], shape.top_k
        weights = dict(zip(truth.topk_ids_TK[token].tolist(), truth.topk_weights_TK[token].tolist(), strict=True))
        same = set(predicted) == set(true)
        row = {
            name: [len(set(true) & set(order[: math.ceil(factor * top_k)])) / top_k] for name, factor in BUDGETS.items()
        }
        row |= {
            "exact_set": [float(same)],
            "weight_covered": [sum(w for e, w in weights.items() if e in predicted) / sum(weights.values())],
            "rank_alignment": [float(p == t) for p, t in zip(predicted, true, strict=True)],
        }
        for name, values in row.items():
            rows.setdefault(name, []).append(values)
    return {name: [sum(column) / len(column) for column in zip(*values, strict=True)] for name, values in rows.items()}


shapes = st.integers(2, 12).flatmap(
    lambda experts: st.builds(
        lambda top_k: ModelShape(layers=2, experts=experts, top_k=top_k, hidden=4), st.integers(1, experts)
    )
)


@settings(max_examples=60, deadline=None)
@given(
    shape=shapes,
    seed=st.integers(0, 10_000),
    tokens=st.integers(1, 12),
    noise=st.sampled_from([0.0, 0.3, 3.0]),
    biased=st.booleans(),
)
def test_metrics_follow_their_definitions(
    shape: ModelShape, seed: int, tokens: int, noise: float, biased: bool
) -> None:
    truth = random_routing(seed, tokens, shape, biased=biased)
    forecast = near(truth, seed + 1, noise)
    found = scored(shape, forecast, truth)
    for name, expected in reference_scores(forecast, truth, shape).items():
        torch.testing.assert_close(found[name].flatten(), torch.tensor(expected), msg=name)


def test_ties_in_weight_go_to_the_higher_logit() -> None:
    logits_TE = torch.tensor([[0.1, 0.9, 0.5, -1.0]])
    for ids in itertools.permutations([0, 1, 2]):
        tied = Forecast(
            layer=1,
            logits_TE=logits_TE,
            topk_ids_TK=torch.tensor([ids]),
            topk_weights_TK=torch.full((1, 3), 0.25, dtype=torch.bfloat16),
        )
        assert rank_routing(tied).ids_TK.tolist() == [[1, 2, 0]]


def test_layers_are_kept_apart() -> None:
    shape = ModelShape(layers=4, experts=8, top_k=2, hidden=4)
    truth = random_routing(0, 20, shape)
    means = RoutingMeans(shape, 3)
    means.update(0, comparison_of(truth, truth))
    means.update(2, comparison_of(near(truth, 1, 2.0), truth))
    first, second, third = means.per_layer()["recall_at_k"].tolist()
    assert first == 1.0
    assert math.isnan(second)
    assert third == pytest.approx(reference_scores(near(truth, 1, 2.0), truth, shape)["recall_at_k"][0])


def test_batches_add_up_to_the_whole() -> None:
    """Means are sums and counts, so the split of the tokens into batches does not matter."""
    shape = ModelShape(layers=2, experts=16, top_k=4, hidden=4)
    truth = random_routing(0, 37, shape)
    forecast = near(truth, 5, 0.5)

    def part(routing: Forecast, rows: slice) -> Forecast:
        return Forecast(
            layer=1,
            logits_TE=routing.logits_TE[rows],
            topk_ids_TK=routing.topk_ids_TK[rows],
            topk_weights_TK=routing.topk_weights_TK[rows],
        )

    halves = [part(each, rows) for rows in (slice(30), slice(30, None)) for each in (forecast, truth)]
    whole, added = scored(shape, forecast, truth), scored(shape, *halves)
    for name in whole.keys() - {"cosine"}:
        torch.testing.assert_close(added[name], whole[name], msg=name)


def test_cosine_is_the_mean_over_tokens_and_absent_without_an_input() -> None:
    shape = ModelShape(layers=3, experts=8, top_k=2, hidden=4)
    truth = random_routing(0, 3, shape)
    means = RoutingMeans(shape, 2)
    cosine_T = torch.tensor([1.0, 0.0, -0.4])
    means.update(0, compare(truth, rank_routing(truth), cosine_T=cosine_T))
    means.update(1, compare(truth, rank_routing(truth)))
    values = means.per_layer()["cosine"]
    assert values[0].item() == pytest.approx(0.2)
    assert values[1].isnan()


def test_rank_alignment_keeps_its_rank_axis_for_one_expert() -> None:
    shape = ModelShape(layers=2, experts=8, top_k=1, hidden=4)
    truth = random_routing(0, 5, shape)
    assert scored(shape, truth, truth)["rank_alignment"].tolist() == [[1.0]]


def test_chance_levels_are_what_random_forecasts_score() -> None:
    shape = ModelShape(layers=2, experts=6, top_k=2, hidden=4)
    truth, forecast = random_routing(0, 20_000, shape), random_routing(1, 20_000, shape)
    found, chance = scored(shape, forecast, truth), chance_levels(shape)
    for name in set(found) & set(chance):
        assert found[name].mean().item() == pytest.approx(chance[name], abs=0.012), name


def bisected(logits_E: Tensor, top_k: int) -> Tensor:
    low, high = -1e3, 1e3
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if torch.sigmoid(logits_E - middle).sum() > top_k else (low, middle)
    return torch.sigmoid(logits_E - low)


@settings(max_examples=60, deadline=None)
@given(
    shape=shapes,
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([0.0, 0.01, 1.0, 8.0, 200.0]),
    rounded=st.booleans(),
)
def test_inclusion_probabilities_sum_to_k_and_follow_the_logits(
    shape: ModelShape, seed: int, scale: float, rounded: bool
) -> None:
    logits_TE = scale * random_routing(seed, 6, shape).logits_TE
    logits_TE = logits_TE.round() if rounded else logits_TE  # ties across the K-th place
    probability_TE = inclusion_probability(logits_TE, shape.top_k)
    assert ((probability_TE >= 0) & (probability_TE <= 1)).all()
    torch.testing.assert_close(probability_TE.sum(1), torch.full((6,), float(shape.top_k)), atol=2e-3, rtol=0)
    if shape.top_k < shape.experts:
        reference_TE = torch.stack([bisected(row.double(), shape.top_k) for row in logits_TE])
        torch.testing.assert_close(probability_TE.double(), reference_TE, atol=5e-3, rtol=0)


def test_probabilities_of_many_tokens_take_a_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that converge early must neither drift away nor hold up the batch."""
    calls: list[int] = []
    sigmoid = torch.sigmoid
    monkeypatch.setattr(torch, "sigmoid", lambda values: (calls.append(1), sigmoid(values))[1])
    logits_TE = 2.5 * torch.randn(2048, 64, generator=torch.Generator().manual_seed(0))
    probability_TE = inclusion_probability(logits_TE, 4)
    torch.testing.assert_close(probability_TE.sum(1), torch.full((2048,), 4.0), atol=1.1e-3, rtol=0)
    assert len(calls) <= 8
