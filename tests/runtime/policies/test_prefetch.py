"""Prefetch policies and the calibration under them."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from fractions import Fraction
from math import ceil
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from expertcast.predictors.base import Forecast, LogOdds
from expertcast.predictors.view import ModelShape, overfetched
from expertcast.runtime.policies.base import CacheShape
from expertcast.runtime.policies.prefetch import (
    PREFETCH,
    Calibration,
    Candidates,
    LinkState,
    Percentile,
    RunningQuantile,
    Value,
    saved_s,
)
from expertcast.training.metrics import budget

# Forecasts and links made by hand


def wanted(logits_TE: Tensor, top_k: int, layer: int = 1) -> Candidates:
    """A forecast whose own experts are those with the highest logits."""
    probability_TE = logits_TE.float().softmax(dim=-1)
    weights_TK, ids_TK = probability_TE.topk(top_k, dim=-1)
    forecast = Forecast(layer=layer, logits_TE=logits_TE, topk_ids_TK=ids_TK, topk_weights_TK=weights_TK)
    return Candidates(forecast, ids_TK.tolist(), weights_TK.tolist())


def of_probabilities(rows: list[list[float]], top_k: int, layer: int = 1) -> Candidates:
    """A forecast with these softmax probabilities."""
    return wanted(torch.tensor(rows).log(), top_k, layer)


def transfer(
    *,
    copy_s: float = 1.0,
    backlog_s: float = 0.0,
    deadline_s: float = 100.0,
    free: int = 0,
    worth: float = 0.0,
    resident: Collection[int] = (),
) -> LinkState:
    return LinkState(
        copy_s=copy_s,
        backlog_s=backlog_s,
        deadline_s=deadline_s,
        free=free,
        resident=lambda expert: expert in resident,
        victim_worth=lambda: worth,
    )


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
    assert len(policy.experts(one, None)) == expected
    shape = ModelShape(layers=2, experts=EXPERTS, top_k=top_k, hidden=4)
    assert budget(float(factor), shape) == expected
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


@pytest.mark.parametrize(("experts", "count"), [(8, 2), (16, 4), (60, 12), (64, 13), (128, 26)])
def test_one_tokens_percentile_is_a_count(experts: int, count: int) -> None:
    """The 80th percentile of one token's E scores always selects the same number of experts."""
    policy = _made("percentile:over=token", experts, 2)
    for seed in range(5):
        logits_1E = _logits(seed, 1, experts, scale=0.1 + seed)
        forecast = wanted(logits_1E, 2)
        got = policy.experts(forecast, None)
        scores_E = forecast.probability_TE[0].numpy()
        assert len(got) == count
        assert set(got) == set(np.flatnonzero(scores_E >= np.quantile(scores_E, 0.8)).tolist())
        assert got == sorted(got, key=lambda expert: -scores_E[expert])


def test_mass_by_hand() -> None:
    """80%: .5 + .25 = .75 is too little, .15 more is enough. The second token needs .6 + .3 = .9: experts 3 and 2."""
    rows = [[0.5, 0.25, 0.15, 0.1], [0.05, 0.05, 0.3, 0.6]]
    policy = _made("percentile:over=mass", 4, 2)
    assert policy.experts(of_probabilities(rows[:1], 2), None) == [0, 1, 2]
    assert policy.experts(of_probabilities(rows[1:], 2), None) == [3, 2]
    # both: sums over tokens .55 .30 .45 .70
    assert policy.experts(of_probabilities(rows, 2), None) == [3, 0, 2, 1]


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


# Probabilities of use: by hand, against a batch fit, and on the reference model


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def test_starts_as_the_margin() -> None:
    """K = 2: the boundary lies halfway between 1 and 0. Two tokens need what either needs."""
    calibration = Calibration(2)
    one = calibration.probability(1, torch.tensor([[3.0, 1.0, 0.0, -2.0]]))
    assert one.tolist() == pytest.approx([_sigmoid(value) for value in (2.5, 0.5, -0.5, -2.5)])
    two = calibration.probability(1, torch.tensor([[3.0, 1.0, 0.0, -2.0], [0.0, 4.0, -2.0, 2.0]]))  # boundary 1
    others = [_sigmoid(value) for value in (-1.0, 3.0, -3.0, 1.0)]
    assert two.tolist() == pytest.approx([1 - (1 - p) * (1 - q) for p, q in zip(one, others, strict=True)])


def test_one_step_by_hand() -> None:
    """Margins .5 and -.5 of two experts, the second is needed: p = s(.5) = .6225, 1 - p = .3775 = s(-.5).

    Gradient of (slope, offset): (p - 0) (.5, 1) + (1 - p - 1) (-.5, 1) = (p, 0).
    Information: p (1 - p) ((.25, 0), (0, 1)) * 2, and 1 of the start on the diagonal.
    """
    calibration = Calibration(1)
    p = calibration.probability(1, torch.tensor([[1.0, 0.0]]))[0]
    assert p == pytest.approx(_sigmoid(0.5))
    calibration.learn(1, [1])
    assert calibration.fit[0] == pytest.approx(1 - p / (1 + 0.5 * p * (1 - p)))
    assert calibration.fit[1] == pytest.approx(0.0)


def test_learns_only_from_forecasts() -> None:
    calibration = Calibration(1)
    calibration.learn(3, [0])
    assert tuple(calibration.fit) == (1.0, 0.0)
    calibration.probability(3, torch.tensor([[2.0, 0.0, 1.0]]))
    calibration.learn(3, [0])
    learnt = calibration.fit[0]
    assert learnt > 1.0
    calibration.learn(3, [1])
    assert calibration.fit[0] == learnt, "the outcome was known already"


@pytest.mark.parametrize("tokens", [1, 3])
def test_finds_what_outcomes_were_drawn_with(tokens: int) -> None:
    """Experts are needed with probability s(2.5 margin - .4), each token's for itself."""
    generator = torch.Generator().manual_seed(0)
    calibration = Calibration(4)
    for _ in range(2500):
        logits_TE = torch.randn(tokens, 32, generator=generator)
        ranked_TE = logits_TE.sort(descending=True).values
        margin_TE = logits_TE - (ranked_TE[:, 3:4] + ranked_TE[:, 4:5]) / 2
        drawn_TE = torch.rand(tokens, 32, generator=generator) < (2.5 * margin_TE - 0.4).sigmoid()
        calibration.probability(2, logits_TE)
        calibration.learn(2, drawn_TE.any(dim=0).nonzero().flatten().tolist())
    assert calibration.fit[0] == pytest.approx(2.5, rel=0.08)
    assert calibration.fit[1] == pytest.approx(-0.4, abs=0.08)


@pytest.mark.parametrize("right", [True, False])
def test_stays_finite(right: bool) -> None:
    """Forecasts that are always right, or always wrong, by far."""
    calibration = Calibration(2)
    for _ in range(3000):
        p_E = calibration.probability(0, torch.tensor([[50.0, 40.0, -40.0, -50.0]]))
        assert ((p_E > 0) & (p_E <= 1)).all()
        calibration.learn(0, [0, 1] if right else [2, 3])
    first, last = p_E[0], p_E[3]
    assert (first > 0.99 and last < 0.01) if right else (first < 0.01 and last > 0.99)


def test_every_expert_is_needed_where_all_are_chosen() -> None:
    assert (Calibration(4).probability(0, torch.randn(1, 4)) > 0.999).all()


def test_a_calibrated_forecast_is_where_it_starts() -> None:
    """The predictor's calibration is the start, and online learning adapts it to the current sequence."""
    logits_TE = torch.tensor([[3.0, 1.0, 0.0, -2.0]])
    log_odds = LogOdds(2.0, 0.5, -1.0)
    calibration = Calibration(2)
    started = calibration.probability(1, logits_TE, log_odds)
    forecast = Forecast(
        layer=1, logits_TE=logits_TE, topk_ids_TK=torch.tensor([[0, 1]]), topk_weights_TK=torch.ones(1, 2)
    )
    torch.testing.assert_close(
        torch.tensor(started), replace(forecast, log_odds=log_odds).probability()[0].double(), rtol=1e-6, atol=1e-7
    )
    calibration.learn(1, [0, 1])
    assert (calibration.probability(1, logits_TE, log_odds)[:2] > started[:2]).all()


def test_selections_read_it() -> None:
    """The first expert is likely by its logit; with a calibration that makes all unlikely no copy pays."""
    shape = CacheShape(layers=2, experts=4, top_k=1, slots=8)
    plain = wanted(torch.tensor([[2.0, 0.0, -9.0, -9.0]]), 1)
    flat = wanted(torch.tensor([[2.0, 0.0, -9.0, -9.0]]), 1)
    flat.forecast.log_odds = LogOdds(0.0, 0.0, -8.0)
    for forecast, expected in ((plain, [0]), (flat, [])):
        policy = PREFETCH.choose("value").make(shape)
        assert [expert for expert in policy.experts(forecast, transfer(free=4)) if expert == 0] == expected


# What a copy is worth: by hand, and outcome by outcome


P = [0.9, 0.6, 0.3, 0.1]
LOGITS = torch.tensor([[math.log(p / (1 - p)) for p in P]])
"""K = 2: the boundary lies at (log-odds .6 + log-odds .3) / 2 = (.405 - .847) / 2 = -.221, so the probabilities at the
start are those of log-odds higher by .221: .918, .652, .348, .122."""


def _value(text: str = "value") -> Value:
    policy = PREFETCH.choose(text).make(CacheShape(layers=4, experts=4, top_k=2, slots=8))
    assert isinstance(policy, Value)
    return policy


def _chosen(given: LinkState, text: str = "value") -> list[int]:
    return _value(text).experts(wanted(LOGITS, 2), given)


ALWAYS = "value:eviction=always"


@pytest.mark.parametrize(
    ("text", "expected", "given"),
    [
        # free slots and time take all
        ("value", [0, 1, 2, 3], {"free": 4}),
        ("value:least=0.2", [0, 1, 2], {"free": 4}),
        # a wrong copy pays for its victim: .082 * .95 < .918; .348 * .95 < .652; .652 * .95 = .619 > .348
        ("value", [0, 1], {"worth": 0.95}),
        ("value", [0, 1, 2], {"worth": 0.95, "free": 3}),
        ("value", [0, 1, 2], {"worth": 0.5}),
        # every copy does: .918, .652, .348, .122 against the victim's probability
        (ALWAYS, [0], {"worth": 0.7}),
        (ALWAYS, [0, 1], {"worth": 0.4}),
        (ALWAYS, [], {"worth": 0.95}),
        (ALWAYS, [0], {"worth": 0.95, "free": 1}),
        (ALWAYS, [0, 1, 2], {"worth": 0.4, "free": 3}),
        # copies of 1 s: two arrive, the third could not even begin; a backlog of 1 s leaves one
        ("value", [0, 1], {"free": 4, "deadline_s": 2.0}),
        ("value", [0], {"free": 4, "deadline_s": 2.0, "backlog_s": 1.0}),
        ("value", [], {"free": 4, "deadline_s": 2.0, "backlog_s": 2.0}),
        # .4 s of 1 s come too late: .918 * .6 saved, .082 * .4 lost: .518; with .05 s left: .0459 saved, .0779 lost
        (ALWAYS, [0], {"deadline_s": 0.6, "worth": 0.51}),
        (ALWAYS, [], {"deadline_s": 0.6, "worth": 0.53}),
        ("value", [], {"deadline_s": 0.05, "free": 4}),
        # copies that take a hundred times what is left
        ("value", [], {"copy_s": 100.0, "deadline_s": 1.0, "free": 4}),
        # its own are 0 and 1: 1 is protected whatever the link does; 2, which is resident too, is not
        ("value", [1], {"deadline_s": 0.0, "resident": (1, 2)}),
        ("value", [0, 1, 3], {"free": 4, "resident": (1, 2)}),
    ],
)
def test_what_is_worth_its_copy(text: str, expected: list[int], given: dict[str, Any]) -> None:
    assert _chosen(transfer(**given), text) == expected


def test_parts_in_memory() -> None:
    """1 s is left. Reading 0 or 2 takes 100 s and is not worth it; decoding 1 or 3 takes .4 s."""
    given = replace(transfer(deadline_s=1.0, free=4), seconds_of=lambda expert: 0.4 if expert in (1, 3) else 100.0)
    assert _chosen(given) == [1, 3]
    assert _chosen(replace(given, seconds_of=lambda _expert: 100.0)) == []


def test_learns_what_forecasts_are_worth() -> None:
    """Against a victim of .5: the second expert (.652) is loaded until it turns out to be needed hardly ever."""
    policy = _value("value:eviction=always")
    forecast, given = wanted(LOGITS, 2), transfer(worth=0.5)
    assert policy.experts(forecast, given) == [0, 1]
    for _ in range(100):
        policy.see_routing(1, [0])
        chosen = policy.experts(forecast, given)
    assert chosen == [0]


@given(p=st.floats(0.0, 1.0), left=st.floats(0.0, 3.0), backlog=st.floats(0.0, 2.0), copy_s=st.floats(0.1, 2.0))
def test_against_both_outcomes(p: float, left: float, backlog: float, copy_s: float) -> None:
    """Used, the layer waits for what is left of the copy instead of a whole one; not used, whoever misses next does.
    A copy that has not begun when the layer asks is dropped, or begins as a miss would."""
    finish = backlog + copy_s
    waited_if_used = min(copy_s, max(0.0, finish - left))
    waited_if_not = 0.0 if backlog >= left else max(0.0, finish - left)
    expected = p * (copy_s - waited_if_used) - (1 - p) * waited_if_not
    assert saved_s(p, backlog, copy_s, left) == pytest.approx(expected, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 1000),
    left=st.floats(0.0, 5.0),
    backlog=st.floats(0.0, 2.0),
    worth=st.floats(0.0, 1.0),
    free=st.integers(0, 3),
)
def test_stopping_early_leaves_nothing_out(seed: int, left: float, backlog: float, worth: float, free: int) -> None:
    """No expert after the first that is not worth its copy would be worth it in its place."""
    logits_1E = torch.randn(1, 12, generator=torch.Generator().manual_seed(seed))
    policy = PREFETCH.choose("value:eviction=always").make(CacheShape(layers=4, experts=12, top_k=3, slots=8))
    given = transfer(deadline_s=left, backlog_s=backlog, worth=worth, free=free)
    chosen = policy.experts(wanted(logits_1E, 3), given)
    ranked = logits_1E[0].sort(descending=True)
    assert chosen == ranked.indices[: len(chosen)].tolist()
    margin_E = ranked.values - ranked.values[2:4].mean()
    p = [value for value in margin_E.double().sigmoid().tolist() if value >= 0.02][len(chosen) :]
    for value in p:
        assert saved_s(value, backlog + len(chosen), given.copy_s, left) <= worth * (len(chosen) >= free) + 1e-6
