"""Hints name the experts that forecasts name: predictors with random weights, in every family of models."""

from __future__ import annotations

import math
from itertools import combinations, permutations
from random import Random

import pytest
import torch

from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors import ExpertcastError, MoEView
from expertcast.predictors.base import Predictor, PredictorConfig, RouterState
from expertcast.predictors.baselines import QuasiHidden
from expertcast.predictors.early_attention import EarlyAttention, EarlyConfig
from expertcast.predictors.estimator import Estimator, EstimatorConfig
from expertcast.predictors.folded import hints
from expertcast.predictors.hybrid import Hybrid, HybridConfig
from expertcast.predictors.linear import INPUTS, Linear, LinearConfig
from expertcast.runtime.engine.speculation import Speculator
from expertcast.training.scoring import Fitted
from tests.families.models import CONFIGS, tiny_model
from tests.predictors.test_routing_rule import BY_LOGITS

STATES = 64
OTHERS = [name for name in INPUTS if name != "quasi_hidden"]
OTHER_NORM = {"phimoe"}
"""Layer norms."""
SHAPES = {
    "quasi_hidden": (QuasiHidden, PredictorConfig()),
    "linear": (Linear, LinearConfig()),
    "linear_of_wide_models": (Linear, LinearConfig(inputs=["early", "routing", "previous"], stand_in_rank=2)),
    "linear_of_router_input": (Linear, LinearConfig(inputs=["router_input"])),
    "early_attention": (EarlyAttention, EarlyConfig(stand_in_rank=2)),
    "estimator": (Estimator, EstimatorConfig(inputs=INPUTS, stand_in_rank=2, width=8)),
}


def random_predictor(name: str, view: MoEView) -> Predictor:
    cls, config = SHAPES[name]
    return randomised(cls(config, view.shape).bind(view))


def randomised(predictor: Predictor) -> Predictor:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in predictor.state_dict().values():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.1 * torch.randn(tensor.shape))
    if "usual_LE" in dict(predictor.named_buffers()):  # the usual logits of the previous token are about their mean
        predictor.usual_LE -= predictor.usual_LE.mean(dim=1, keepdim=True)
    return predictor


def random_state(view: MoEView, layer: int, generator: torch.Generator, tokens: int = 1) -> RouterState:
    shape, dtype = view.shape, view[0].dtype
    residual_TD, early_TD = torch.randn(2, tokens, shape.hidden, generator=generator).to(dtype)
    router_input_TD = view[layer].router_input(residual_TD)
    logits_TE, weights_TK, ids_TK = view[layer].routed(router_input_TD)
    previous_TLE = torch.randn(tokens, shape.layers, shape.experts, generator=generator)
    if torch.rand(1, generator=generator) < 0.2:
        previous_TLE[:] = torch.nan
    return RouterState(
        layer=layer, residual_TD=residual_TD, router_input_TD=router_input_TD, logits_TE=logits_TE,
        topk_ids_TK=ids_TK, topk_weights_TK=weights_TK, early_TD=early_TD,
        previous_logits_TLE=previous_TLE if torch.rand(1, generator=generator) < 0.7 else None,
    )  # fmt: skip


def recall(predictor: Predictor, view: MoEView, layer: int, states: int, tokens: int = 1) -> float:
    """Share of the experts with the highest forecast logits that hints name, in the forecasts' order."""
    generator, named, found = torch.Generator().manual_seed(layer), 0, 0
    made = hints(predictor, layer, 1)
    assert made is not None
    for _ in range(states):
        state = random_state(view, layer, generator, tokens)
        own_TE = predictor.forecast(state).logits_TE.float()
        close = 1e-3 if view[0].dtype == torch.float32 else 5e-2
        assert (made.logits(state) - own_TE).abs().max() <= close * own_TE.abs().max()
        own_TK = own_TE.topk(view.shape.top_k).indices
        for own, hinted in zip(own_TK.tolist(), made.ids(state, view.shape.top_k).tolist(), strict=True):
            named, found = named + len(own), found + len(set(own) & set(hinted))
    return found / named


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_hints_are_the_forecasts_experts(family: str, name: str, tokens: int) -> None:
    view = find_moe_layers(tiny_model(family, torch.float32))
    predictor = random_predictor(name, view)
    if family in OTHER_NORM:
        assert hints(predictor, 0, 1) is None
        return
    for layer in range(len(view) - 1):
        assert recall(predictor, view, layer, STATES // tokens, tokens) >= 0.999


@pytest.mark.parametrize("inputs", [subset for size in range(5) for subset in combinations(OTHERS, size)])
@torch.no_grad()
def test_the_order_of_an_estimators_inputs_does_not_matter(inputs: tuple[str, ...]) -> None:
    """Forecasts and hints of one predictor agree for each choice of inputs, in any order; none is taken twice."""
    view = find_moe_layers(tiny_model("qwen2_moe", torch.float32))
    orders = Random(0).sample(list(permutations(["quasi_hidden", *inputs])), k=min(2, math.factorial(len(inputs) + 1)))
    state = random_state(view, 0, torch.Generator().manual_seed(1), tokens=5)
    logits, weights = [], None
    for order in orders:
        config = EstimatorConfig(inputs=order, stand_in_rank=2, width=8)
        predictor = randomised(Estimator(config, view.shape).bind(view))
        weights = weights or predictor.state_dict()
        predictor.load_state_dict(weights)
        logits.append(predictor.forecast(state).logits_TE)
        for layer in range(len(view) - 1):
            assert recall(predictor, view, layer, STATES) >= 0.999
        for name in order:
            with pytest.raises(ExpertcastError, match="each once"):
                EstimatorConfig(inputs=(*order, name))
    assert all(torch.equal(each, logits[0]) for each in logits)


@torch.no_grad()
def test_hints_of_a_hybrid_are_those_of_its_members() -> None:
    """Without them the runtime would trace a program for each layer and batch size in the first steps of a batch."""
    view = find_moe_layers(tiny_model("qwen2_moe", torch.float32))
    names = [("quasi_hidden", "early_attention")[layer % 2] for layer in range(1, len(view))]
    choices = [{"ahead": 1, "layer": layer, "predictor": name, "recall": {}} for layer, name in enumerate(names, 1)]
    configs = {name: SHAPES[name][1].as_dict() for name in names}
    config = HybridConfig(candidates=tuple(dict.fromkeys(names)), choices=choices, member_configs=configs)
    hybrid = Hybrid(config, view.shape)
    for name, member in hybrid.members.items():
        member.load_state_dict(random_predictor(name, view).state_dict())
    hybrid.bind(view)
    for layer in range(len(view) - 1):
        assert recall(hybrid, view, layer, STATES) >= 0.999


@torch.no_grad()
def test_a_pair_that_kept_the_targets_router_reads_early_attention_alone() -> None:
    view = find_moe_layers(tiny_model("qwen3_moe", torch.float32))
    predictor = random_predictor("linear_of_wide_models", view)
    trained, router = predictor.maps(0, 1), random_predictor("early_attention", view).maps(0, 1)
    assert trained is not None
    assert router is not None
    assert list(trained.of) == ["early", "routing", "previous"]
    predictor.get_buffer("weight_PFE_1")[0].zero_()[: view.shape.hidden] = router.of["early"]
    predictor.get_buffer("bias_PE_1")[0] = router.bias_X
    kept = predictor.maps(0, 1)
    assert kept is not None
    assert list(kept.of) == ["early"]
    assert torch.equal(kept.bias_X, router.bias_X)
    assert recall(predictor, view, 0, STATES) >= 0.999


@torch.no_grad()
def test_hints_of_fitted_predictors_in_bf16(reference_view: MoEView, fitted_predictors: dict[str, Fitted]) -> None:
    for name in ("quasi_hidden", "linear", "early_attention", "estimator"):
        assert recall(fitted_predictors[name].predictor, reference_view, 5, 100) >= 0.98, name


@pytest.mark.parametrize("family", CONFIGS)
def test_routers_with_groups_or_biases_have_forecasts_only(family: str) -> None:
    view = find_moe_layers(tiny_model(family, torch.float32))
    speculator = Speculator(view, random_predictor("quasi_hidden", view))
    speculator.hint_only(view.shape.top_k)
    assert all((rung.hinted is not None) == (family in BY_LOGITS) for rung in speculator.rungs)
