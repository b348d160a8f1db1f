"""Traced forecasts: the predictor's own bits, and the predictor itself where a trace would not do."""

from __future__ import annotations

import operator
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast.data.machine import without_onednn
from expertcast.data.traced import TracedForecasts
from expertcast.predictors import MoEView
from expertcast.predictors.base import Predictor, PredictorConfig, RouterState
from expertcast.predictors.folded import hints
from expertcast.training.scoring import Fitted


def _state(view: MoEView, layer: int, tokens: int, previous: bool, early: bool = False) -> RouterState:
    shape = view.shape
    residual_TD = torch.randn(tokens, shape.hidden, dtype=torch.bfloat16)
    router_input_TD = view[layer].router_input(residual_TD)
    logits_TE, weights_TK, ids_TK = view[layer].router(router_input_TD)
    return RouterState(
        layer=layer,
        residual_TD=residual_TD,
        router_input_TD=router_input_TD,
        logits_TE=logits_TE,
        topk_ids_TK=ids_TK,
        topk_weights_TK=weights_TK,
        previous_logits_TLE=torch.randn(tokens, shape.layers, shape.experts) if previous else None,
        early_TD=torch.randn_like(residual_TD) if early else None,
    )


@pytest.mark.parametrize("tokens", [1, 3])
def test_the_predictors_own_bits(
    tokens: int, reference_model: PreTrainedModel, reference_view: MoEView, fitted_predictors: dict[str, Fitted]
) -> None:
    torch.manual_seed(0)
    asking = [parameter.requires_grad for parameter in reference_model.parameters()]
    for name, fitted in fitted_predictors.items():
        traced = TracedForecasts(fitted.predictor)
        for layer in (0, 7):
            for call in range(8):
                early = fitted.predictor.wants_early(layer, 1)
                state = _state(reference_view, layer, tokens, previous=call % 2 == 0, early=early)
                run = without_onednn if tokens == 1 else operator.call
                if early:
                    assert torch.equal(traced.stand_in(state), run(fitted.predictor.stand_in, state))
                got, own = traced.forecast(state, 1), run(fitted.predictor.forecast, state, 1)
                assert got.layer == own.layer == layer + 1
                assert got.log_odds == own.log_odds
                assert own.log_odds is not None, name
                for one, other in zip(_tensors(got), _tensors(own), strict=True):
                    assert one.dtype == other.dtype
                    assert torch.equal(one, other), name
        assert all(program.run is not None for program in traced._programs.values()), f"{name} could not be traced"
        assert bool(traced._programs) == (tokens == 1), "no programs for each batch size of a server"
    assert [parameter.requires_grad for parameter in reference_model.parameters()] == asking


def _tensors(forecast: object) -> list[Tensor]:
    return [getattr(forecast, name) for name in ("logits_TE", "topk_ids_TK", "topk_weights_TK")]


@pytest.mark.parametrize("tokens", [1, 3])
def test_hints_of_one_token_are_traced(
    tokens: int, reference_view: MoEView, fitted_predictors: dict[str, Fitted]
) -> None:
    forecasts = TracedForecasts(fitted_predictors["early_attention"].predictor)
    forecasts.hinted = 4
    own = hints(forecasts.predictor, 2, 1)
    assert own is not None
    for _ in range(8):
        state = _state(reference_view, 2, tokens, previous=False, early=True)
        found = forecasts.hint(state, 1)
        assert found is not None
        assert torch.equal(found, (without_onednn if tokens == 1 else operator.call)(own.ids, state, 4))
    assert [program.run is not None for program in forecasts._programs.values()] == [True] * (tokens == 1)


class _Counting(Predictor):
    """Keeps a state in Python: a trace of it would repeat the first answer."""

    name: ClassVar[str] = "counting"
    calls = 0

    def logits(self, state: RouterState, ahead: int) -> Tensor:
        self.calls += 1
        return torch.nn.functional.one_hot(torch.tensor([self.calls % self.shape.experts]), self.shape.experts).float()


@pytest.mark.parametrize("traceable", [True, False])
def test_a_predictor_with_a_state_runs_itself(traceable: bool, reference_view: MoEView) -> None:
    predictor = _Counting(PredictorConfig(), reference_view.shape).bind(reference_view)
    predictor.traceable = traceable
    traced = TracedForecasts(predictor)
    state = _state(reference_view, 2, 1, previous=False)
    seen = [int(traced.forecast(state, 1).topk_ids_TK[0, 0]) for _ in range(6)]
    assert len(set(seen)) == 6, "each call has its own answer"
    assert all(program.run is None for program in traced._programs.values())
