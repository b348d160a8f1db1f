"""Predictors without learned maps, against naive loops; what every predictor and forecast can do."""

from __future__ import annotations

import pytest
import torch

from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors import DefaultVectors, ExpertcastError, Forecast, MoEView, PredictorConfig, RouterState
from expertcast.predictors.baselines import Frequency, NextNorm, PreviousToken, QuasiHidden, RouterInput
from expertcast.predictors.messages import aligned
from tests.families.models import tiny_model
from tests.training.synthetic import random_batch, tiny_view

TOKENS = 40


@pytest.fixture(scope="module")
def view() -> MoEView:
    return tiny_view()


@pytest.fixture(scope="module")
def state(view: MoEView) -> RouterState:
    return random_batch(view, TOKENS).with_previous().state(view, 0)


def random_defaults(view: MoEView) -> DefaultVectors:
    shape, generator = view.shape, torch.Generator().manual_seed(5)
    return DefaultVectors(
        expert_LED=torch.randn(shape.layers, shape.experts, shape.hidden, generator=generator),
        shared_LD=torch.randn(shape.layers, shape.hidden, generator=generator),
        count_LE=torch.ones(shape.layers, shape.experts, dtype=torch.int64),
        token_count=1,
    )


def assert_router_of(view: MoEView, layer: int, hidden_TD: torch.Tensor, forecast: Forecast) -> None:
    """The forecast is exactly what the layer's router returns for these inputs."""
    logits_TE, weights_TK, ids_TK = view[layer].router(hidden_TD)
    assert forecast.layer == layer
    assert torch.equal(forecast.logits_TE, logits_TE)
    assert torch.equal(forecast.topk_ids_TK, ids_TK)
    assert torch.equal(forecast.topk_weights_TK, weights_TK)


def test_router_input_and_next_norm_go_through_the_target_router(view: MoEView, state: RouterState) -> None:
    forecast = RouterInput(PredictorConfig(), view.shape).bind(view).forecast(state)
    assert_router_of(view, 1, state.router_input_TD, forecast)
    forecast = NextNorm(PredictorConfig(), view.shape).bind(view).forecast(state)
    assert_router_of(view, 1, view[1].norm(state.residual_TD), forecast)


def test_a_predictor_says_for_which_models_it_is(view: MoEView) -> None:
    """In one line, without the tensors that it learned."""
    said = repr(NextNorm(PredictorConfig(), view.shape))
    assert said == "NextNorm(layers=4, experts=8, top_k=2, hidden=32, ahead=[1])"


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "qwen2_moe", "glm4_moe_lite"])
def test_quasi_hidden_is_the_sum_over_experts(family: str) -> None:
    """Also where weights do not add up to one (olmoe) and shared experts add to the block (qwen2, glm4)."""
    view = find_moe_layers(tiny_model(family, dtype=torch.float32))
    predictor = QuasiHidden(PredictorConfig(), view.shape)
    defaults = random_defaults(view)
    predictor.set_defaults(defaults)
    predictor.bind(view)
    state = random_batch(view, 6).state(view, 0)
    rows = []
    for t in range(6):
        row = state.residual_TD[t] + defaults.shared_LD[0]
        for k in range(view.shape.top_k):
            row = row + state.topk_weights_TK[t, k] * defaults.expert_LED[0, state.topk_ids_TK[t, k]]
        rows.append(row)
    expected_TD = view[1].norm(torch.stack(rows))
    torch.testing.assert_close(predictor.input_vector(state, 1), expected_TD)
    assert_router_of(view, 1, predictor.input_vector(state, 1), predictor.forecast(state))


def test_default_vectors_of_another_model_are_refused(view: MoEView) -> None:
    defaults = random_defaults(view)
    defaults.expert_LED = defaults.expert_LED[:, :, :-1]
    with pytest.raises(ExpertcastError, match="do not fit a model"):
        QuasiHidden(PredictorConfig(), view.shape).set_defaults(defaults)


def counted(cls: type[Frequency], view: MoEView) -> Frequency:
    predictor = cls(PredictorConfig(), view.shape)
    ids_TK = torch.tensor([[0, 1], [0, 2], [0, 1]])
    weights_TK = torch.tensor([[0.5, 0.3], [0.7, 0.2], [0.6, 0.1]])
    predictor.observe(1, ids_TK, weights_TK)
    predictor.bind(view)
    return predictor


def test_frequency_counts(view: MoEView, state: RouterState) -> None:
    predictor = counted(Frequency, view)
    assert view.shape.top_k == 2
    forecast = predictor.forecast(state)
    assert forecast.topk_ids_TK.tolist() == [[0, 1]] * TOKENS
    # means .6 and .2, scaled from .8 to the mean total of (1.8 + .6) / 3 = .8
    torch.testing.assert_close(forecast.topk_weights_TK[0], torch.tensor([0.6, 0.2]))
    share_E = forecast.logits_TE[0].exp()
    torch.testing.assert_close(share_E.sum(), torch.tensor(1.0))
    torch.testing.assert_close(share_E[0] / share_E[3], torch.tensor(4.0))


def test_frequency_ignores_a_correction_bias() -> None:
    """glm4 adds a bias to the scores that choose: put there, it must not reorder counts."""
    model = tiny_model("glm4_moe_lite", dtype=torch.float32)
    view = find_moe_layers(model)
    bias = dict(view[1].router.named_buffers())["e_score_correction_bias"]
    bias[-1] = 100.0
    predictor = Frequency(PredictorConfig(), view.shape)
    ids_TK = torch.arange(view.shape.top_k)[None]
    predictor.observe(1, ids_TK, torch.ones_like(ids_TK).float())
    forecast = predictor.bind(view).forecast(random_batch(view, 3).state(view, 0))
    assert sorted(forecast.topk_ids_TK[0].tolist()) == ids_TK[0].tolist()


def test_previous_token_repeats_the_row_before(view: MoEView) -> None:
    batch = random_batch(view, TOKENS, document_tokens=7).with_previous()
    forecast = counted(PreviousToken, view).forecast(batch.state(view, 0))
    fallback = counted(Frequency, view).forecast(batch.state(view, 0))
    ids_TK, weights_TK = view[1].route(batch.logits_TLE[:, 1])
    for t in range(TOKENS):
        expected_ids_K, expected_weights_K = ids_TK[t - 1], weights_TK[t - 1]
        if t % 7 == 0:
            expected_ids_K, expected_weights_K = fallback.topk_ids_TK[t], fallback.topk_weights_TK[t]
        assert torch.equal(forecast.topk_ids_TK[t], expected_ids_K)
        torch.testing.assert_close(forecast.topk_weights_TK[t], expected_weights_K)
    unknown = batch.state(view, 0)
    unknown.previous_logits_TLE = None
    assert torch.equal(counted(PreviousToken, view).forecast(unknown).topk_ids_TK, fallback.topk_ids_TK)


def test_distance_and_layer_are_checked(view: MoEView, state: RouterState) -> None:
    predictor = NextNorm(PredictorConfig(ahead=(1,)), view.shape).bind(view)
    with pytest.raises(ExpertcastError, match="not 2"):
        predictor.forecast(state, ahead=2)
    with pytest.raises(ExpertcastError, match="ahead="):
        PredictorConfig(ahead=(0,))


TENSORS = ("logits_TE", "topk_ids_TK", "topk_weights_TK")


def made(tokens: int, first: int) -> Forecast:
    """A forecast whose numbers tell the token that they are of."""
    row_T1 = torch.arange(first, first + tokens)[:, None]
    return Forecast(
        layer=3, logits_TE=row_T1 + torch.arange(8) / 8, topk_ids_TK=row_T1.repeat(1, 2), topk_weights_TK=row_T1 / 2
    )


def same(one: Forecast, other: Forecast) -> bool:
    return one.layer == other.layer and all(torch.equal(getattr(one, name), getattr(other, name)) for name in TENSORS)


def test_forecasts_are_joined_and_sliced() -> None:
    whole = made(6, 0)
    assert same(Forecast.join([made(1, 0), made(3, 1), made(2, 4)]), whole)
    assert same(whole[1:4], made(3, 1))
    assert same(whole[torch.tensor([4, 5])], made(2, 4))


def test_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [["run", "ms", "mode"], ["lru", "12.5", "a"], ["belady", "3", ""]]
    assert aligned(rows).splitlines() == ["run       ms  mode", "lru     12.5     a", "belady     3"]
    monkeypatch.setenv("COLUMNS", "12")
    assert aligned(rows).splitlines() == [
        "run       ms",
        "lru     12.5",
        "belady     3",
        "",
        "run     mode",
        "lru        a",
        "belady",
    ]
    monkeypatch.delenv("COLUMNS")
    assert aligned(rows, left=3).splitlines() == ["run     ms    mode", "lru     12.5  a", "belady  3"]
