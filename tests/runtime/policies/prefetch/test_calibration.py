"""Probabilities of use: by hand, against a batch fit, and on the reference model."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from expertcast.data.traces import TraceDataset
from expertcast.predictors import Forecast, PredictorConfig
from expertcast.predictors.base import LogOdds
from expertcast.predictors.baselines import QuasiHidden
from expertcast.runtime.policies import PREFETCH, CacheShape
from expertcast.runtime.policies.prefetch import Calibration
from tests.runtime.policies.prefetch.made import transfer, wanted


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


def _error(p: np.ndarray, needed: np.ndarray) -> float:
    """Expected calibration error over ten bins."""
    index = np.minimum((p * 10).astype(int), 9)
    inside = [index == number for number in range(10)]
    return sum(abs(p[rows].mean() - needed[rows].mean()) * rows.mean() for rows in inside if rows.any())


def test_on_the_reference_model(reference_traces: TraceDataset) -> None:
    """Quasi-hidden forecasts, token after token: the stated probabilities come true after a few tokens."""
    view = reference_traces.view
    predictor = QuasiHidden(PredictorConfig(), view.shape)
    predictor.set_defaults(reference_traces.defaults)
    predictor.bind(view)
    (batch,) = reference_traces.batches("test", 400, max_tokens=400)
    forecasts, needed = [], []
    for layer in range(len(view) - 1):
        forecasts.append(predictor.forecast(batch.state(view, layer)).logits_TE)
        needed.append(batch.state(view, layer + 1).topk_ids_TK.tolist())
    learning, untaught = Calibration(view.shape.top_k), Calibration(view.shape.top_k)
    stated, start, came = [], [], []
    for token in range(400):
        for layer, logits_TE in enumerate(forecasts):
            row_1E = logits_TE[token : token + 1]
            stated.append(learning.probability(layer + 1, row_1E))
            start.append(untaught.probability(layer + 1, row_1E))
            came.append(np.isin(np.arange(view.shape.experts), needed[layer][token]))
            learning.learn(layer + 1, needed[layer][token])
    after = 64 * (len(view) - 1)
    hits = np.concatenate(came[after:])
    error, error_at_start = (_error(np.concatenate(rows[after:]), hits) for rows in (stated, start))
    assert error < 0.015
    assert error < error_at_start / 4


def test_a_calibrated_forecast_is_where_it_starts() -> None:
    """Its own reading comes first, and what is learnt online is how the text differs from the validation's."""
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


@pytest.mark.parametrize("selection", ["threshold", "value"])
def test_selections_read_it(selection: str) -> None:
    """As the logits stand the first expert is likely; a reading by which none is leaves nothing worth a copy."""
    shape = CacheShape(layers=2, experts=4, top_k=1, slots=8)
    plain = wanted(torch.tensor([[2.0, 0.0, -9.0, -9.0]]), 1)
    flat = wanted(torch.tensor([[2.0, 0.0, -9.0, -9.0]]), 1)
    flat.forecast.log_odds = LogOdds(0.0, 0.0, -8.0)
    for given, expected in ((plain, [0]), (flat, [])):
        policy = PREFETCH.choose(selection).make(shape)
        assert [expert for expert in policy.experts(given, transfer(free=4)) if expert == 0] == expected
