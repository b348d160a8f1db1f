"""Percentile selections against numpy's quantile over lists that are kept whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from expertcast.predictors import ExpertcastError
from expertcast.runtime.policies.base import CacheShape
from expertcast.runtime.policies.prefetch import PREFETCH, Percentile, RunningQuantile
from tests.runtime.policies.prefetch.made import of_probabilities, wanted

STEP = 2 ** (1 / 32)
"""Scores of one bin differ by less than this factor."""


def _made(text: str, experts: int, top_k: int) -> Percentile:
    policy = PREFETCH.choose(text).make(CacheShape(layers=4, experts=experts, top_k=top_k, slots=16))
    assert isinstance(policy, Percentile)
    return policy


def _logits(seed: int, tokens: int, experts: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("experts", "count"), [(8, 2), (16, 4), (60, 12), (64, 13), (128, 26)])
def test_one_tokens_percentile_is_a_count(experts: int, count: int) -> None:
    """Trap 6: over one token's own E scores the 80th percentile leaves the same number of experts, always."""
    policy = _made("percentile:over=token", experts, 2)
    for seed in range(5):
        logits_1E = _logits(seed, 1, experts, scale=0.1 + seed)
        forecast = wanted(logits_1E, 2)
        got = policy.experts(forecast, None)
        scores_E = forecast.probability_TE[0].numpy()
        assert len(got) == count
        assert set(got) == set(np.flatnonzero(scores_E >= np.quantile(scores_E, 0.8)).tolist())
        assert got == sorted(got, key=lambda expert: -scores_E[expert])


def test_on_the_device_too() -> None:
    logits_TE = _logits(0, 3, 16)
    policy = _made("percentile:over=token", 16, 2)
    ids_N = policy.device_ids(wanted(logits_TE, 2).forecast)
    assert ids_N is not None
    assert ids_N.shape == (3 * 4,)
    assert ids_N[:3].tolist() == logits_TE.argmax(dim=-1).tolist(), "each token's first, then each one's second"
    assert set(ids_N.tolist()) == set(policy.experts(wanted(logits_TE, 2), None))
    assert _made("percentile", 16, 2).device_ids(wanted(logits_TE, 2).forecast) is None


def test_mass_by_hand() -> None:
    """80%: .5 + .25 = .75 is too little, .15 more is enough. The second token needs .6 + .3 = .9: experts 3 and 2."""
    rows = [[0.5, 0.25, 0.15, 0.1], [0.05, 0.05, 0.3, 0.6]]
    policy = _made("percentile:over=mass", 4, 2)
    assert policy.experts(of_probabilities(rows[:1], 2), None) == [0, 1, 2]
    assert policy.experts(of_probabilities(rows[1:], 2), None) == [3, 2]
    # both: sums over tokens .55 .30 .45 .70
    assert policy.experts(of_probabilities(rows, 2), None) == [3, 0, 2, 1]


def test_history_by_hand() -> None:
    """K = 2 of 4, median. Scores relative to the second highest probability:

    layer 1: .64/.16 = 4, 1, .12/.16 = .75, .08/.16 = .5    seen .5 .75 1 4: the quantile lies between .75 and 1
    layer 2: .4/.4 = 1, 1, .1/.4 = .25, .25                 seen .25 .25 .5 .75 1 1 1 4: still between .75 and 1
    layer 1: .26/.25 = 1.04, 1, .25/.25 = 1, .24/.25 = .96  seen ... : of 12 the 6th and 7th are .96 and 1
    """
    policy = _made("percentile:percentile=50", 4, 2)
    assert policy.experts(of_probabilities([[0.64, 0.16, 0.12, 0.08]], 2, layer=1), None) == [0, 1]
    assert policy.experts(of_probabilities([[0.4, 0.1, 0.4, 0.1]], 2, layer=2), None) == [0, 2]
    assert policy.experts(of_probabilities([[0.24, 0.26, 0.25, 0.25]], 2, layer=1), None) == [1, 2, 3]


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
        got = set(policy.experts(forecast, None))
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
        chosen = policy.experts(forecast, None)
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
    assert _made("percentile:percentile=95", 8, 2).experts(wanted(logits_1E, 2), None) == [5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("percentile:percentile=100", "percentile=100.0: give a number between 0 and 100, such as 80"),
        ("percentile:percentile=0", "percentile=0.0: give a number between 0 and 100, such as 80"),
        ("percentile:over=layer", "unknown over='layer': choose from history, token, mass"),
        ("percentile:share=2", "its options are percentile, over"),
    ],
)
def test_bad_values(text: str, message: str) -> None:
    with pytest.raises(ExpertcastError) as caught:
        PREFETCH.choose(text)
    assert message in str(caught.value)
