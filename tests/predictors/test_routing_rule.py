"""Routing rules of all layers, and routers that go by more than their logits."""

from __future__ import annotations

import copy
import types
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedModel, Qwen3MoeForCausalLM

import expertcast
from expertcast.data.collect import collect
from expertcast.data.models import load_tokenizer
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.text import load_documents
from expertcast.predictors import ExpertcastError
from expertcast.predictors.base import PredictorConfig
from expertcast.predictors.baselines import NextNorm
from expertcast.predictors.view import RuleCheck, follows_rule, renormalises, route_all, routes_by_logits, weights_over
from expertcast.runtime.engine.front import speculate
from tests.families.models import CONFIGS, tiny_model

BY_LOGITS = {"qwen3_moe", "gpt_oss", "olmoe", "mixtral", "qwen2_moe", "phimoe"}
"""The others add a correction bias to the scores, or choose groups of experts first."""


@pytest.mark.parametrize("family", CONFIGS)
def test_all_layers_are_routed_by_their_own_rules(family: str) -> None:
    view = find_moe_layers(tiny_model(family))
    logits_TLE = torch.randn(5, len(view), view.shape.experts, generator=torch.Generator().manual_seed(1))
    ids, weights = route_all(view, logits_TLE)
    assert len(ids) == len(weights) == len(view)
    for layer in view:
        ids_TK, weights_TK = layer.route(logits_TLE[:, layer.index])
        assert torch.equal(ids[layer.index], ids_TK)
        assert torch.equal(weights[layer.index], weights_TK)
    assert len(route_all(view, logits_TLE[:, :1])[0]) == 1


@pytest.mark.parametrize("family", CONFIGS)
def test_the_routers_own_choice_keeps_its_weights_in_another_order(family: str) -> None:
    layer = find_moe_layers(tiny_model(family))[0]
    logits_TE = torch.randn(16, layer.num_experts, generator=torch.Generator().manual_seed(2))
    ids_TK, weights_TK = layer.route(logits_TE)
    torch.testing.assert_close(weights_over(layer, logits_TE, ids_TK.flip(-1)), weights_TK.flip(-1))


@pytest.mark.parametrize("family", CONFIGS)
def test_the_routers_own_logits_are_routed_as_by_itself(family: str) -> None:
    """To the bit, whatever the dtype of the logits, and on the router's device; in bf16 `test_all_families` says it."""
    layer = find_moe_layers(tiny_model(family, torch.float32))[1]
    hidden_TD = torch.randn(6, layer.hidden_size, generator=torch.Generator().manual_seed(3))
    logits_TE, weights_TK, ids_TK = layer.routed(hidden_TD)
    for given_TE in (logits_TE, logits_TE.double()):
        found_TK, found_weights_TK = layer.route(given_TE)
        assert torch.equal(found_TK, ids_TK)
        assert torch.equal(found_weights_TK, weights_TK)
        assert found_weights_TK.dtype == weights_TK.dtype
        assert not found_weights_TK.requires_grad
    layer.router.to("meta")  # any other device
    layer.router.register_forward_pre_hook(lambda *_: pytest.fail("a hook of the model's run was called"))
    assert {each.device.type for each in layer.route(logits_TE.detach())} == {"meta"}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_trace_goes_on_after_a_forecast() -> None:
    layer = find_moe_layers(tiny_model("mixtral").requires_grad_(False))[0]

    def function(given: Tensor) -> Tensor:
        layer.route(torch.zeros(1, layer.num_experts))
        return given + 1

    traced = torch.jit.trace(function, torch.zeros(2), check_trace=False)
    assert traced(torch.ones(2)).tolist() == [2, 2]


def test_a_router_whose_logits_nothing_computes_is_refused() -> None:
    layer = find_moe_layers(tiny_model("mixtral"))[0]
    given = torch.zeros(1, 8), torch.ones(1, 2), torch.tensor([[0, 1]])
    layer.router.forward = lambda _hidden_TD: given
    with pytest.raises(ExpertcastError, match=type(layer.router).__name__):
        layer.route(torch.zeros(1, 8))


@pytest.mark.parametrize("experts", [4, 60, 512])
def test_many_experts_are_told_apart(experts: int) -> None:
    """Their logits stay different in bf16; no number is drawn from the generator that samples a text."""
    sizes = {"num_local_experts": experts, "num_experts_per_tok": 3}
    config = GptOssConfig(**{**CONFIGS["gpt_oss"].to_dict(), **sizes})
    view = find_moe_layers(GptOssForCausalLM(config).bfloat16())
    before = torch.get_rng_state()
    assert routes_by_logits(view)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("family", CONFIGS)
def test_which_routers_go_by_their_logits_alone(family: str) -> None:
    assert routes_by_logits(find_moe_layers(tiny_model(family))) == (family in BY_LOGITS)


WRONG = 2


def by_the_inputs_size(router: nn.Module) -> None:
    """Give a router a multiplier on its weights that its logits do not show."""
    own = router.forward

    def forward(_self: nn.Module, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE, weights_TK, ids_TK = own(hidden_TD)
        return logits_TE, weights_TK * (1 + hidden_TD.abs().mean(-1, keepdim=True)), ids_TK

    router.forward = types.MethodType(forward, router)


def by_something_that_is_gone(router: nn.Module) -> None:
    """Make a router end in an error on any input that is not its block's."""
    own = router.forward

    def forward(_self: nn.Module, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not hidden_TD.any():
            raise TypeError("missing 1 required positional argument")
        return own(hidden_TD)

    router.forward = types.MethodType(forward, router)


@pytest.fixture(params=[by_the_inputs_size, by_something_that_is_gone])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    made = tiny_model("mixtral")
    request.param(made.model.layers[WRONG].mlp.gate)
    return made


def greedy(model: PreTrainedModel) -> Tensor:
    prompt = torch.arange(3, 12)[None]
    output = model.generate(
        prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    return torch.stack(output.logits)


def test_own_routers_follow_their_rule() -> None:
    view = find_moe_layers(tiny_model("mixtral"))
    check = RuleCheck(view)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check.try_out()
        assert check.unseen == {0, 1, 2, 3}
        for layer in view:
            check.see(layer.index, torch.randn(5, 32).bfloat16())
    assert not check.wrong
    assert not check.unseen


def test_a_layer_that_goes_by_more_gets_no_forecast(model: PreTrainedModel) -> None:
    """It follows its own router; the others' forecasts are executed, and one line says so."""
    view = find_moe_layers(model)
    assert [follows_rule(layer, torch.randn(5, 32).bfloat16()) for layer in view] == [True, True, False, True]
    predictor = NextNorm(PredictorConfig(), view.shape).bind(view)
    executed: dict[int, list[bool]] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with speculate(
            model, view, predictor,
            observe=lambda call, ids: executed.setdefault(call.layer, []).append(ids is call.ids_TK),
        ):  # fmt: skip
            greedy(model)
    lines = [str(each.message) for each in caught if "by its own logits" in str(each.message)]
    assert len(lines) == 1
    assert f"MixtralTopKRouter of MoE layer {WRONG} " in lines[0]
    assert "\n" not in lines[0]
    assert all(executed[0])
    assert not any(executed[1])
    assert all(executed[WRONG]), "its own router's ids"
    assert not any(executed[3])


def test_offloaded_in_every_mode(model: PreTrainedModel) -> None:
    expected = greedy(model)
    with pytest.warns(UserWarning, match="have no forecasts"), expertcast.offload(
        model, predictor="next_norm", slots=8, forecasts="always"
    ):  # fmt: skip
        assert torch.equal(greedy(model), expected)
    for mode, layers in (("speculate", None), ("hybrid", [WRONG])):
        with pytest.warns(UserWarning, match="have no forecasts"):
            offloaded = expertcast.offload(
                model, predictor="next_norm", mode=mode, layers=layers, slots=8, forecasts="always"
            )
        with offloaded:
            assert torch.equal(greedy(model), expected) == (mode == "hybrid")


def test_the_first_batch_is_asked_too() -> None:
    """A router changes its rule at a batch size that random test inputs do not reach."""
    model = tiny_model("mixtral")
    router = model.model.layers[WRONG].mlp.gate
    own = router.forward

    def forward(_self: nn.Module, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE, weights_TK, ids_TK = own(hidden_TD)
        return logits_TE, weights_TK * (2.0 if len(hidden_TD) == 9 and hidden_TD.any() else 1.0), ids_TK

    router.forward = types.MethodType(forward, router)
    expected = greedy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        offloaded = expertcast.offload(
            model, predictor="next_norm", mode="hybrid", layers=[WRONG], slots=8, forecasts="always"
        )
    with offloaded, pytest.warns(UserWarning, match="have no forecasts"):
        assert torch.equal(greedy(model), expected)


def test_collection_is_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(ExpertcastError, match="by its own logits") as caught:
        collect(
            model,
            load_tokenizer("reference"),
            load_documents(["reference"]),
            tmp_path / "traces",
            tokens=200,
            window=20,
        )
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "traces").exists()


def test_weights_have_the_dtype_of_the_routers_input() -> None:
    """The router's own weight is float32, and what it returns follows its input."""
    layer = find_moe_layers(tiny_model("mixtral"))[0]
    own = layer.router.float().forward

    def forward(hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE, weights_TK, ids_TK = own(hidden_TD.float())
        return logits_TE, weights_TK.to(hidden_TD.dtype), ids_TK

    layer.router.forward = forward
    logits_TE, weights_TK, _ = layer.routed(torch.randn(6, layer.hidden_size).bfloat16())
    found_TK = layer.route(logits_TE)[1]
    assert found_TK.dtype == weights_TK.dtype == torch.bfloat16
    assert torch.equal(found_TK, weights_TK)


@pytest.mark.parametrize("constant", [False, True])
def test_whether_weights_of_many_experts_sum_to_a_constant(constant: bool) -> None:
    """Two of 512 weigh .004 where logits are equal: sums may differ by little and not be the same."""
    config = copy.deepcopy(CONFIGS["qwen3_moe"])
    config.num_experts, config.norm_topk_prob = 512, constant
    layer = find_moe_layers(Qwen3MoeForCausalLM(config).bfloat16())[0]
    assert layer.num_experts == 512
    assert renormalises(layer) == constant
