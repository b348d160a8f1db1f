"""Prefetch policies."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from expertcast.predictors.base import Forecast
from expertcast.predictors.view import overfetched
from expertcast.runtime.policies.base import CacheShape
from expertcast.runtime.policies.prefetch import PREFETCH, Candidates, Percentile, RunningQuantile

# Forecasts made by hand


def wanted(logits_TE: Tensor, top_k: int, layer: int = 1) -> Candidates:
    """A forecast whose own experts are those with the highest logits."""
    probability_TE = logits_TE.float().softmax(dim=-1)
    weights_TK, ids_TK = probability_TE.topk(top_k, dim=-1)
    forecast = Forecast(layer=layer, logits_TE=logits_TE, topk_ids_TK=ids_TK, topk_weights_TK=weights_TK)
    return Candidates(forecast, ids_TK.tolist(), weights_TK.tolist())


# Number of experts of an overfetch factor: one rule in runtime, simulator and evaluation


EXPERTS = 32


@pytest.mark.parametrize(
    ("factor", "top_k"), [("1.1", 4), ("1.5", 3), ("1.5", 5), ("1.2", 6), ("2.0", 4), ("1.12", 25)]
)
def test_runtime_and_evaluation_round_up(factor: str, top_k: int) -> None:
    """The paper's ceil(f k), by exact arithmetic; `round` would give 4, 4, 8, 7 for the first four."""
    expected = min(EXPERTS, ceil(Fraction(factor) * top_k))
    policy = PREFETCH.choose(f"top_k:overfetch={factor}").make(
        CacheShape(layers=2, experts=EXPERTS, top_k=top_k, slots=64)
    )
    one = wanted(torch.arange(EXPERTS).flip(0)[None].float(), top_k)
    assert len(policy.experts(one)) == expected
    assert overfetched(float(factor), top_k, EXPERTS) == expected


# Percentile selections against numpy's quantile over lists that are kept whole


STEP = 2 ** (1 / 32)
"""Scores of one bin differ by less than this factor."""


def _made(text: str, experts: int, top_k: int) -> Percentile:
    policy = PREFETCH.choose(text).make(CacheShape(layers=4, experts=experts, top_k=top_k, slots=16))
    assert isinstance(policy, Percentile)
    return policy


def _logits(seed: int, tokens: int, experts: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    tokens=st.integers(1, 3),
    percentile=st.floats(1.0, 99.0),
    scale=st.sampled_from([0.2, 1.0, 3.0]),
)
def test_history_against_the_whole_list(seed: int, tokens: int, percentile: float, scale: float) -> None:
    """Everything at or above numpy's quantile of all scores so far, and nothing that is not within one bin of it."""
    policy = _made(f"percentile:percentile={percentile}", 16, 3)
    seen: list[float] = []
    for step in range(6):
        forecast = wanted(_logits(seed + step, tokens, 16, scale), 3, layer=step % 3)
        p_TE = forecast.probability_TE.numpy()
        score_TE = p_TE / np.sort(p_TE, axis=1)[:, -3:-2]
        seen += score_TE.ravel().tolist()
        bound = np.quantile(seen, percentile / 100, method="higher")
        got = set(policy.experts(forecast))
        assert got >= set(np.flatnonzero((score_TE >= bound * STEP).any(axis=0)).tolist())
        assert got <= set(np.flatnonzero((score_TE > bound / STEP).any(axis=0)).tolist())


@given(scores=st.lists(st.floats(1e-5, 100.0), min_size=1, max_size=200), share=st.floats(0.0, 1.0))
def test_running_quantile(scores: list[float], share: float) -> None:
    quantile = RunningQuantile()
    for start in range(0, len(scores), 7):
        quantile.add(quantile.bins(np.array(scores[start : start + 7])))
    # "higher" at the same rank: rounding of share * (n - 1) is the policy's own
    expected = np.sort(scores)[int(np.ceil(round(share * (len(scores) - 1), 9)))]
    assert quantile.bin_at(share) == quantile.bins(np.array([expected]))[0]


def test_a_sharp_router_keeps_its_own() -> None:
    """Logits eight times as steep in one layer: a token's own K are taken there too, by plain probabilities not all."""
    policy, counts = _made("percentile", 64, 4), []
    forecasts = [
        wanted(_logits(1000 * layer + step, 1, 64, scale), 4, layer)
        for step in range(200)
        for layer, scale in ((1, 0.5), (2, 4.0))
    ]
    for forecast in forecasts:
        chosen = policy.experts(forecast)
        assert set(chosen) >= set(forecast.ids[0])
        counts.append(len(chosen))
    assert 12 < sum(counts) / 400 < 14, "a fifth of 64, in the mean"
    plain = torch.cat([forecast.probability_TE for forecast in forecasts])
    left_out = (plain > plain.flatten().quantile(0.8)).sum(dim=1) < 4
    assert left_out.float().mean() > 0.1


def test_a_router_that_is_sure_of_one() -> None:
    """All probability on one expert: the others' are 0 in float32, and so is the K-th."""
    logits_1E = torch.zeros(1, 8)
    logits_1E[0, 5] = 500.0
    assert _made("percentile:percentile=95", 8, 2).experts(wanted(logits_1E, 2)) == [5]
