"""Calibration: the error by its definition, the fit on validation, and what evaluation and checkpoints make of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from expertcast.checkpoints.checkpoint import PredictorCheckpoint, load_predictor, save_predictor
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError, Forecast, ModelShape, PredictorConfig, names
from expertcast.predictors.base import LogOdds, inclusion_probability, margin
from expertcast.predictors.hybrid import Hybrid
from expertcast.training import calibrate as calibration
from expertcast.training.calibrate import fit_log_odds
from expertcast.training.evaluation import evaluate
from expertcast.training.fit import FITTERS, fit
from expertcast.training.metrics import Calibration, membership_probability
from expertcast.training.scoring import FitOptions, Fitted
from tests.sealed import edit_json
from tests.training.synthetic import Rows, Same, random_batch, tiny_view
from tests.training.test_metrics import comparison_of, near, random_routing

SHAPE = ModelShape(layers=2, experts=16, top_k=4, hidden=4)


def drawn(probability_TE: Tensor, seed: int = 0) -> Tensor:
    """Membership [T, E] drawn with these probabilities."""
    return torch.rand(probability_TE.shape, generator=torch.Generator().manual_seed(seed)) < probability_TE


def pairs_of(metric: Calibration, forecast: Forecast, truth: Forecast) -> tuple[Tensor, Tensor]:
    """Probabilities and hits of all pairs, which the metric is given too."""
    comparison = comparison_of(forecast, truth)
    metric.update(0, comparison)
    return membership_probability(comparison, calibrated=True).flatten(), comparison.truth.member_TE.flatten()


def equal_mass_error(p_N: Tensor, hit_N: Tensor, groups: int = 15) -> float:
    """The definition: pairs in order of probability, cut into groups of equally many."""
    order_N = p_N.argsort()
    p, hit = p_N[order_N].double(), hit_N[order_N].double()
    gaps = [(p[own] - hit[own]).sum().abs() for own in torch.arange(len(p)).tensor_split(groups)]
    return float(sum(gaps) / len(p))


@pytest.mark.parametrize("log_odds", [None, LogOdds(2.0, 0.5, -0.4, 1.0)])
def test_the_error_is_that_of_groups_of_equal_mass(log_odds: LogOdds | None) -> None:
    truth = random_routing(0, 3000, SHAPE)
    forecast = replace(near(truth, 1, 0.8), log_odds=log_odds)
    metric = Calibration(1, bins=5)
    p_N, hit_N = pairs_of(metric, forecast, truth)
    result = metric.compute()
    assert result["ece"].item() == pytest.approx(equal_mass_error(p_N, hit_N), abs=2e-3)
    assert result["ece_L"].item() == result["ece"].item()
    likely_N = p_N > 0.05
    assert result["ece_likely"].item() == pytest.approx(equal_mass_error(p_N[likely_N], hit_N[likely_N]), abs=2e-3)
    for index in range(5):
        inside_N = (p_N * 5).long().clamp(max=4) == index
        assert result["count_B"][index] == inside_N.sum()
        assert result["confidence_B"][index].item() == pytest.approx(p_N[inside_N].mean().item(), abs=1e-5)
        assert result["frequency_B"][index].item() == pytest.approx(hit_N[inside_N].float().mean().item(), abs=1e-6)


def test_it_is_good_where_experts_are_drawn_by_the_probabilities() -> None:
    """Membership drawn with exactly the stated probabilities comes out calibrated, sharper logits do not."""
    logits_TE = 2 * torch.randn(4000, 16, generator=torch.Generator().manual_seed(0))
    member_TE = drawn(inclusion_probability(logits_TE, 4), seed=2)
    routed = random_routing(0, 4000, SHAPE)
    found = []
    for factor in (1.0, 4.0):
        comparison = comparison_of(replace(routed, logits_TE=factor * logits_TE), routed)
        comparison.truth.member_TE.copy_(member_TE)
        metric = Calibration(1)
        metric.update(0, comparison)
        found.append(metric.compute())
    for key in ("ece", "ece_likely"):
        assert found[0][key] < 0.012 < 0.05 < found[1][key]


def test_without_likely_pairs_there_is_no_error_of_them() -> None:
    truth = random_routing(0, 5, SHAPE)
    metric = Calibration(1)
    metric.update(0, comparison_of(replace(truth, log_odds=LogOdds(0.0, 0.0, -9.0, 1.0)), truth))
    result = metric.compute()
    assert result["ece_likely"].isnan()
    assert result["ece"].item() == pytest.approx(0.25, abs=1e-3), "a quarter of the pairs are there"


def test_a_forecast_that_is_always_sure_and_mostly_wrong_is_not_calibrated() -> None:
    """A probability that rounds to 1 belongs to the last bin, not to the first."""
    truth = random_routing(0, 60, SHAPE)
    metric = Calibration(1)
    metric.update(0, comparison_of(replace(random_routing(1, 60, SHAPE), log_odds=LogOdds(0.0, 0.0, 40.0, 1.0)), truth))
    result = metric.compute()
    assert result["ece"].item() == result["ece_likely"].item() == pytest.approx(0.75)


def test_the_fit_has_a_prior_of_one_pair() -> None:
    """If every forecast is right, only the prior bounds the slope: it minimises loss + |fit - (1, 0, 0)|^2 / 2."""
    margin_TE = torch.tensor([[2.0, 1.0, -1.0, -2.0]])
    found = fit_log_odds(margin_TE, margin_TE > 0)
    margin_N = margin_TE[0].double()
    bent_N = margin_N.sign() * (1 + margin_N.abs() / found.unit).log()
    x_N3 = torch.stack([margin_N, bent_N, torch.ones(4)], dim=1)
    fit_3 = torch.tensor([found.slope, found.bend, found.offset]).double()
    gradient_3 = ((x_N3 @ fit_3).sigmoid() - (margin_N > 0).double()) @ x_N3 + fit_3 - torch.tensor([1.0, 0.0, 0.0])
    torch.testing.assert_close(gradient_3, torch.zeros(3).double(), atol=1e-2, rtol=0)


def test_it_reads_tokens_of_the_whole_split(monkeypatch: pytest.MonkeyPatch) -> None:
    view = tiny_view()
    rows = Rows(view, random_batch(view, 900, document_tokens=900).with_previous())
    monkeypatch.setattr(calibration, "TOKENS", 50)
    seen = list[Tensor]()
    monkeypatch.setattr(calibration, "states_of", lambda _, batch: seen.append(batch.position_T) or [])
    calibration.calibrate(Same(PredictorConfig(), view.shape).bind(view), rows, FitOptions())
    assert torch.cat(seen).tolist() == list(range(600, 900, 6))


def test_a_predictor_without_training_is_calibrated_on_the_train_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """The validation split of few tokens is one document, whose ways are not those of others."""
    view = tiny_view()
    rows = Rows(view, random_batch(view, 900, document_tokens=900).with_previous())
    monkeypatch.setattr(calibration, "TOKENS", 50)
    monkeypatch.setattr(calibration, "READ", 200)
    seen = list[Tensor]()
    monkeypatch.setattr(calibration, "states_of", lambda _, batch: seen.append(batch.position_T) or [])
    for name, expected in (
        ("next_norm", list(range(0, 200, 4))),
        ("frequency", list(range(600, 700, 2))),
    ):
        seen.clear()
        fit(name, rows, options=FitOptions(validation_tokens=100, progress=False))
        assert torch.cat(seen).tolist() == expected, name


def test_margins_are_measured_from_the_boundary() -> None:
    logits_TE = torch.tensor([[3.0, 1.0, 0.0, -2.0], [90.0, 4.0, 2.0, -90.0]])
    assert margin(logits_TE, 2).tolist() == [[2.5, 0.5, -0.5, -2.5], [12.0, 1.0, -1.0, -12.0]]
    assert margin(logits_TE, 4).eq(12.0).all(), "all of them are among all"
    forecast = Forecast(
        layer=1, logits_TE=logits_TE, topk_ids_TK=torch.zeros(2, 2).long(), topk_weights_TK=torch.zeros(2, 2)
    )
    log_odds = LogOdds(2.0, 0.5, -1.0, 0.1)
    read = replace(forecast, log_odds=log_odds)
    bent = torch.tensor([26.0, 6.0]).log() / 2
    odds = torch.tensor([4 + bent[0], bent[1], -2 - bent[1], -6 - bent[0]])
    torch.testing.assert_close(log_odds.of(logits_TE, 2)[0], odds)
    assert read[:1].log_odds == Forecast.join([read, read]).log_odds == read.log_odds


@pytest.mark.parametrize(
    "drawn_with", [LogOdds(5.5, 1.0, -0.3, 0.1), LogOdds(0.4, 0.0, -2.0, 1.0), LogOdds(0.2, 2.0, 0.1, 0.03)]
)
def test_the_fit_finds_what_was_drawn_with(drawn_with: LogOdds) -> None:
    margin_TE = torch.randn(12_000, 16, generator=torch.Generator().manual_seed(1))
    bent_TE = margin_TE.sign() * (margin_TE.abs() / drawn_with.unit).log1p()
    odds_TE = drawn_with.slope * margin_TE + drawn_with.bend * bent_TE + drawn_with.offset
    found = fit_log_odds(margin_TE, drawn(odds_TE.sigmoid(), seed=2))
    assert not drawn_with.bend or found.unit == drawn_with.unit
    assert found.slope == pytest.approx(drawn_with.slope, abs=0.25)
    assert found.bend == pytest.approx(drawn_with.bend, abs=0.25)
    assert found.offset == pytest.approx(drawn_with.offset, abs=0.04)


def test_the_fit_stays_finite() -> None:
    """Where every forecast is right, and where all are alike."""
    margin_TE = torch.randn(400, 16, generator=torch.Generator().manual_seed(1))
    right = fit_log_odds(margin_TE, margin_TE > 0)
    assert 5 < right.slope + right.bend < 1e3
    alike = fit_log_odds(torch.zeros(400, 16), drawn(torch.full((400, 16), 0.25), seed=2))
    assert alike.offset == pytest.approx(-1.1, abs=0.1)
    assert alike.slope == pytest.approx(1.0)


def test_every_predictor_comes_out_calibrated(
    fitted_predictors: dict[str, Fitted], reference_traces: TraceDataset
) -> None:
    """On the documents that it was fitted on, where what is left is the form's own error: the test split's documents
    are too few here to tell an error from their own ways."""
    predictors = {name: fitted.predictor for name, fitted in fitted_predictors.items() if name in names()}
    layers = reference_traces.view.shape.layers
    for predictor in predictors.values():
        assert [len(predictor.calibration[1])] == [layers - 1]
    values = {}
    for split, trained in (("train", False), ("validation", True)):
        own = {name: each for name, each in predictors.items() if (name in {*FITTERS, Hybrid.name}) == trained}
        report = evaluate(own, reference_traces.batches(split, 4096), reference_traces.view, chained=False)
        values |= report.as_dict()["calibration"]
    assert values.keys() == predictors.keys()
    for name, result in values.items():
        assert result["ece"] < 0.01, name
        assert result["ece_likely"] < 0.02, name
        assert result["before"]["ece"] > 0, name
        assert all(each["low"] <= each["confidence"] <= each["high"] for each in result["bins"] if each["count"]), name
    for name in ("router_input", "quasi_hidden", "linear", "estimator"):
        assert values[name]["ece_likely"] < 0.5 * values[name]["before"]["ece_likely"], name


def test_checkpoints_keep_it(
    fitted_predictors: dict[str, Fitted], reference_traces: TraceDataset, tmp_path: Path
) -> None:
    predictor, view = fitted_predictors["linear"].predictor, reference_traces.view
    save_predictor(predictor, tmp_path / "linear", view=view)
    assert load_predictor(tmp_path / "linear", view).calibration == predictor.calibration


@pytest.mark.parametrize(
    ("readings", "message"),
    [
        ({"2": [[1.0, 0.0, 0.0, 1.0]]}, "calibration has distance '2', not in ['1']"),
        ({"1": [[1.0, 0.0, 0.0, 1.0]]}, "calibration.1 has 1 layer pairs instead of 11"),
        ({"1": [[1.0, 0.0, 0.0]] * 11}, "calibration.1.0 is [1.0, 0.0, 0.0]"),
        ({"1": [["1.0", 0.0, 0.0, 1.0]] * 11}, "calibration.1.0.0 is '1.0'"),
    ],
)
def test_readings_that_do_not_fit_are_refused(
    fitted_predictors: dict[str, Fitted],
    reference_traces: TraceDataset,
    tmp_path: Path,
    readings: dict[str, Any],
    message: str,
) -> None:
    view = reference_traces.view
    save_predictor(fitted_predictors["linear"].predictor, tmp_path / "it", view=view)
    edit_json(tmp_path / "it" / "config.json", lambda values: values.update(calibration=readings))
    with pytest.raises(ExpertcastError) as caught:
        PredictorCheckpoint.open(tmp_path / "it").load(view)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert json.loads((tmp_path / "it" / "config.json").read_text())["calibration"] == readings
