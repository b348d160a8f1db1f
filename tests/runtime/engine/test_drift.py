"""The drift monitor: its recall against a count by hand, one warning after a drift, none without."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast.checkpoints.checkpoint import save_predictor
from expertcast.data.batch import RouterCall
from expertcast.data.taps import RouterTaps
from expertcast.predictors import MoEView, PredictorConfig
from expertcast.predictors.baselines import NextNorm
from expertcast.runtime import offload
from expertcast.runtime.engine import drift
from expertcast.runtime.engine.drift import BLOCK, DriftMonitor, FadingMean
from expertcast.runtime.engine.engine import Engine

LAYERS, TOP_K, EXPERTS = 6, 4, 32


def _run(monitor: DriftMonitor, recall: float, tokens: int, rng: random.Random) -> int:
    """Tokens of forecasts that find an expert with this probability, in texts of 200 tokens that differ by .1 among
    themselves; how often it warned."""
    text = 0.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for token in range(tokens):
            text = rng.uniform(-0.05, 0.05) if token % 200 == 0 else text
            monitor.start()
            for layer in range(1, LAYERS):
                routed = rng.sample(range(EXPERTS), TOP_K)
                forecast = [expert if rng.random() < recall + text else expert + EXPERTS for expert in routed]
                monitor.see(layer, forecast[::-1], routed)
    return len(caught)


def _monitor(expected: float | None = 0.9) -> DriftMonitor:
    by_layer = None if expected is None else dict.fromkeys(range(1, LAYERS), expected)
    return DriftMonitor(LAYERS, TOP_K, by_layer, "linear")


@pytest.mark.parametrize("seed", range(3))
def test_warns_once_after_a_drift_and_never_before(seed: int) -> None:
    rng, monitor = random.Random(seed), _monitor()
    assert _run(monitor, 0.9, 5000, rng) == 0
    assert abs(monitor.drift or 0.0) < 0.03
    assert _run(monitor, 0.8, 3000, rng) == 1
    assert monitor.drift == pytest.approx(0.1, abs=0.03)
    assert _run(monitor, 0.6, 1000, rng) == 0, "once is enough"
    assert monitor.as_dict()["forecast_recall"]["warned"]


def test_small_falls_and_unknown_recall_are_only_shown() -> None:
    monitor = _monitor()
    assert _run(monitor, 0.87, 4000, random.Random(1)) == 0
    assert monitor.drift == pytest.approx(0.03, abs=0.025)
    unknown = _monitor(None)
    assert _run(unknown, 0.2, 2000, random.Random(1)) == 0
    assert unknown.drift is None
    report = unknown.as_dict()["forecast_recall"]
    assert report["mean"] == pytest.approx(0.2, abs=0.03)
    assert report["checkpoint"] is None
    unknown.reset()
    assert unknown.as_dict()["forecast_recall"] == {
        "mean": None, "per_layer": {}, "checkpoint": None, "tokens": 0, "warned": False,
    }  # fmt: skip


def test_a_fall_within_its_own_noise_is_no_drift() -> None:
    """Blocks that find all or nothing: their mean is .06 below the checkpoint's, and its standard error as large."""
    monitor, rng = _monitor(0.56), random.Random(0)
    warned = sum(_run(monitor, float(block % 2) * 2, BLOCK, rng) for block in range(60))
    assert monitor.drift > drift.LEAST
    assert warned == 0


def test_rows_are_compared_each_with_its_own() -> None:
    monitor = _monitor()
    for _ in range(BLOCK):
        monitor.see(1, [1, 2, 3, 4, 5, 6, 7, 8], [4, 3, 9, 9, 1, 2, 3, 5])
        monitor.start()
    assert monitor.as_dict()["forecast_recall"]["per_layer"] == {1: 3 / 8}
    assert monitor.tokens == 2 * BLOCK, "two rows of each forward"
    monitor.see(1, [1, 2, 3, 4], [1, 2, 3, 4] * 2)  # a forecast for other tokens
    assert not any(monitor._ids)


def test_running_means_fade() -> None:
    mean = FadingMean(4)
    values = [1.0, 3.0, 2.0, 6.0]
    for value in values:
        mean.add(value)
    assert mean.mean == pytest.approx(3.0)
    spread = sum((value - 3.0) ** 2 for value in values) / 3
    assert mean.error == pytest.approx((spread / 4) ** 0.5), "all alike so far: the textbook's standard error"
    for _ in range(60):
        mean.add(10.0)
    assert mean.mean == pytest.approx(10.0, abs=1e-5)
    assert FadingMean(4).error == float("inf")


def _decode(model: object, ids: Tensor, tokens: int) -> None:
    past = None
    with torch.no_grad():
        for token in range(tokens):
            output = model(input_ids=ids[:, token : token + 1], past_key_values=past, use_cache=True)  # type: ignore[operator]
            past = output.past_key_values


@pytest.fixture
def block(monkeypatch: pytest.MonkeyPatch) -> int:
    """Blocks of a few tokens."""
    monkeypatch.setattr(drift, "BLOCK", 8)
    monkeypatch.setattr(drift, "SAMPLED", 2)
    return 8


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(0, 4096, (1, 32), generator=torch.Generator().manual_seed(3))


def test_running_recall_is_that_of_a_count_by_hand(
    reference_model: PreTrainedModel, reference_view: MoEView, ids: Tensor, block: int
) -> None:
    predictor = NextNorm(PredictorConfig(), reference_view.shape).bind(reference_view)
    found = torch.zeros(len(reference_view), 2 * block - 1, dtype=torch.float64)
    state: dict[str, Tensor] = {}
    step = -1

    def on_router(call: RouterCall) -> None:
        nonlocal step
        step += call.layer == 0
        if call.layer and step < found.shape[1]:
            target = reference_view[call.layer]
            forecast_TK = target.router(target.router_input(state["residual"]))[2]
            found[call.layer, step] = len(set(forecast_TK[0].tolist()) & set(call.ids_TK[0].tolist())) / 4
        state["residual"] = call.residual_TD

    taps = RouterTaps(reference_model, reference_view, on_router, lambda _fresh: None)
    _decode(reference_model, ids, 2 * block)
    taps.close()
    with offload(reference_model, predictor=predictor, slots=96, forecasts="always") as offloaded:
        _decode(offloaded, ids, 2 * block)
        stats = offloaded.stats.as_dict()
        assert stats["drift"] is None
        offloaded.reset_stats()
        assert offloaded.stats.as_dict()["forecast_recall"]["tokens"] == 0
    blocks = found[:, : block - 1].mean(dim=1), found[:, block - 1 :].mean(dim=1)  # the last of a block closes it
    expected = torch.stack(blocks).mean(dim=0)
    got = stats["forecast_recall"]["per_layer"]
    assert list(got) == list(range(1, 12))
    assert torch.allclose(torch.tensor(list(got.values()), dtype=torch.float64), expected[1:], atol=1e-9)


def test_executed_forecasts_are_compared_with_the_router_now_and_then(
    reference_model: PreTrainedModel, reference_view: MoEView, ids: Tensor, block: int
) -> None:
    predictor = NextNorm(PredictorConfig(), reference_view.shape).bind(reference_view)
    with offload(reference_model, predictor=predictor, mode="speculate", slots=96) as offloaded:
        _decode(offloaded, ids, block)
        report = offloaded.stats.as_dict()["forecast_recall"]
    assert report["tokens"] == block // 2 - 1, "the forward that closes a block counts for the next one"
    assert 0 < report["mean"] < 1, "what ran is the forecast: that would be 1"


def test_a_checkpoint_is_what_recall_falls_from(
    reference_model: PreTrainedModel, reference_view: MoEView, ids: Tensor, block: int, tmp_path: Path
) -> None:
    """A checkpoint that claims too much is warned of; the link, the bits and the way out are as ever."""
    predictor = NextNorm(PredictorConfig(), reference_view.shape).bind(reference_view)
    recall = {"recall_at_k": {"next_norm": {"mean": 1.0, "per_layer": [1.0] * 11}}}
    save_predictor(predictor, tmp_path / "p", view=reference_view, metrics=recall)
    with offload(reference_model, predictor=tmp_path / "p", slots=96, forecasts="always") as offloaded:
        _decode(offloaded, ids, block)
        stats = offloaded.stats.as_dict()
        assert stats["drift"] == pytest.approx(1 - stats["forecast_recall"]["mean"])
    for off in ({"drift": False}, {"predictor": None}):
        with offload(reference_model, **({"predictor": tmp_path / "p", "slots": 96} | off)) as offloaded:
            _decode(offloaded, ids, block)
            assert offloaded.stats.as_dict()["drift"] is None
            assert offloaded.stats.as_dict()["forecast_recall"] is None
            assert isinstance(offloaded._engine, Engine)
            assert offloaded._engine._drift is None
