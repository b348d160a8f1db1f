"""Traced forecasts: the predictor's own bits, and the predictor itself where a trace would not do."""

from __future__ import annotations

import copy
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors import MoEView, predictor_class
from expertcast.predictors.base import Predictor, PredictorConfig, RouterState
from expertcast.runtime import offload
from expertcast.runtime.engine import traced as traced_module
from expertcast.runtime.engine.traced import Program, TracedForecasts
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
                if early:
                    assert torch.equal(traced.stand_in(state), fitted.predictor.stand_in(state))
                got, own = traced.forecast(state, 1), fitted.predictor.forecast(state, 1)
                assert got.layer == own.layer == layer + 1
                assert got.log_odds == own.log_odds
                assert own.log_odds is not None, name
                for one, other in zip(_tensors(got), _tensors(own), strict=True):
                    assert one.dtype == other.dtype
                    assert torch.equal(one, other), name
        assert all(program.run is not None for program in traced._programs.values()), f"{name} could not be traced"
    assert [parameter.requires_grad for parameter in reference_model.parameters()] == asking


def _tensors(forecast: object) -> list[Tensor]:
    return [getattr(forecast, name) for name in ("logits_TE", "topk_ids_TK", "topk_weights_TK")]


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


class _Replayed:
    """What a CUDA graph does, on the CPU: the same tensors in and out, call after call."""

    made = 0

    def __init__(self, program: Program, inputs: tuple[Tensor, ...]) -> None:
        type(self).made += 1
        self._program = program
        self._inputs = tuple(tensor.clone() for tensor in inputs)
        self._outputs = tuple(tensor.clone() for tensor in program(*self._inputs))

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        for own, made in zip(self._outputs, self._program(*self._inputs), strict=True):
            own.copy_(made)
        return self._outputs


@pytest.mark.parametrize("mode", ["exact", "speculate"])
@pytest.mark.parametrize("ahead", [1, 2])
def test_forecasts_that_replay_into_the_same_tensors(
    mode: str, ahead: int, reference_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing reads a forecast after the next token's has been made at its layer."""
    prompt = torch.arange(3, 9).unsqueeze(0)

    def decoded() -> Tensor:
        chosen = predictor_class("router_input")
        view = find_moe_layers(reference_model)
        predictor = chosen(chosen.config_class(ahead=(1, 2)), view.shape)
        with offload(reference_model, predictor=predictor, mode=mode, ahead=ahead, slots=96):
            made: Tensor = reference_model.generate(prompt, max_new_tokens=12, do_sample=False)
        return made

    expected = decoded()
    monkeypatch.setattr(traced_module, "captured", lambda program, inputs, _pool: _Replayed(program, inputs))
    monkeypatch.setattr(_Replayed, "made", 0)
    assert torch.equal(decoded(), expected)
    assert _Replayed.made >= len(find_moe_layers(reference_model)) - ahead


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_graphs_bits_on_a_gpu(reference_model: PreTrainedModel) -> None:
    model = copy.deepcopy(reference_model).to("cuda")
    view = find_moe_layers(model)
    cls = predictor_class("next_norm")
    predictor = cls(cls.config_class(), view.shape).bind(view).to("cuda")
    traced = TracedForecasts(predictor)
    traced.prepare(view, 1)
    assert all(program.replay is not None for program in traced._programs.values())
    for layer in (0, 7):
        for _ in range(3):
            residual_1D = torch.randn(1, view.shape.hidden, device="cuda", dtype=torch.bfloat16)
            router_input_1D = view[layer].router_input(residual_1D)
            logits_1E, weights_1K, ids_1K = view[layer].router(router_input_1D)
            state = RouterState(
                layer=layer, residual_TD=residual_1D, router_input_TD=router_input_1D, logits_TE=logits_1E,
                topk_ids_TK=ids_1K, topk_weights_TK=weights_1K,
            )  # fmt: skip
            for one, other in zip(
                _tensors(traced.forecast(state, 1)), _tensors(predictor.forecast(state)), strict=True
            ):
                assert torch.equal(one, other)
