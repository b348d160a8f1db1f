"""Discovery, routing rule and the inspect report on every family, and the refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from expertcast.data.discovery import find_moe_layers
from expertcast.data.inspection import describe, inspect_model
from expertcast.data.models import load_model, meta_model
from expertcast.data.skeleton import load_skeleton, save_skeleton
from expertcast.predictors.errors import ExpertcastError
from tests.families.models import CONFIGS, DENSE_LAYERS, SHARED, tiny_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", CONFIGS)
def test_route_is_the_routers_own_rule(family: str, dtype: torch.dtype) -> None:
    view = find_moe_layers(tiny_model(family, dtype))
    assert len(view) == 4 - DENSE_LAYERS.get(family, 0)
    for layer in view:
        hidden_TD = torch.randn(33, layer.hidden_size, generator=torch.Generator().manual_seed(1)).to(dtype)
        with torch.no_grad():
            logits_TE, weights_TK, ids_TK = layer.router(hidden_TD)
        got_ids_TK, got_weights_TK = layer.route(logits_TE)
        assert torch.equal(got_ids_TK, ids_TK)
        assert torch.equal(got_weights_TK, weights_TK)


@pytest.mark.parametrize("family", CONFIGS)
def test_captured_states_reproduce_the_routers_logits(family: str) -> None:
    """LN_l(r_l) from the found norm is the router's input, and the router gives the recorded logits on it."""
    model = tiny_model(family)
    view = find_moe_layers(model)
    residuals: dict[int, torch.Tensor] = {}
    logits: dict[int, torch.Tensor] = {}
    hooks = []
    for layer in view:
        hooks.append(layer.norm.register_forward_pre_hook(lambda _m, a, i=layer.index: residuals.update({i: a[0]})))
        hooks.append(layer.router.register_forward_hook(lambda _m, _a, o, i=layer.index: logits.update({i: o[0]})))
    ids = torch.randint(0, 4096, (2, 12), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        model(input_ids=ids)
        for hook in hooks:
            hook.remove()
        for layer in view:
            hidden_TD = layer.router_input(residuals[layer.index]).reshape(-1, layer.hidden_size)
            assert torch.equal(layer.router_logits(hidden_TD), logits[layer.index].reshape(-1, layer.num_experts))


@pytest.mark.parametrize("family", CONFIGS)
def test_report_and_meta_model(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.config.dtype = torch.bfloat16
    model.config.save_pretrained(tmp_path)
    report = inspect_model(str(tmp_path))
    assert report == describe(model, str(tmp_path))
    assert report.supported
    assert report.layers == 4 - DENSE_LAYERS.get(family, 0)
    assert report.dense_layers == DENSE_LAYERS.get(family, 0)
    assert report.shared_experts == (family in SHARED)
    assert report.expert_bytes * report.experts * report.layers == report.all_experts_bytes
    assert report.all_experts_bytes + report.other_bytes == sum(
        p.numel() * p.element_size() for p in model.parameters()
    )


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("qwen3_moe", "softmax, top-k, renormalised to 1"),
        ("gpt_oss", "softmax, top-k, renormalised to 1"),
        ("glm4_moe_lite", "sigmoid, top-k, renormalised to 1, scaled by 1.8, choice by score plus correction bias"),
        ("olmoe", "softmax over all experts, top-k"),
        ("deepseek_v2", "softmax over all experts, top-k, top groups of 2 first"),
        ("phimoe", "own rule"),
    ],
)
def test_routing_rule_in_words(family: str, words: str) -> None:
    assert describe(tiny_model(family, torch.float32), family).routing_rule.startswith(words)


def test_skeleton_round_trip(tmp_path: Path) -> None:
    model = tiny_model("glm4_moe_lite")
    view = find_moe_layers(model)
    save_skeleton(view, model, tmp_path)
    loaded = load_skeleton(tmp_path)
    assert loaded.fingerprint() == view.fingerprint()
    residual_TD = torch.randn(5, 32).bfloat16()
    for mine, theirs in zip(loaded, view, strict=True):
        assert torch.equal(mine.router_input(residual_TD), theirs.router_input(residual_TD))
        logits_TE = torch.randn(5, 8)
        assert all(torch.equal(a, b) for a, b in zip(mine.route(logits_TE), theirs.route(logits_TE), strict=True))


def test_fingerprint_tells_models_apart_and_ignores_dtype() -> None:
    one = find_moe_layers(tiny_model("mixtral", torch.float32)).fingerprint()
    assert one == find_moe_layers(tiny_model("mixtral", torch.bfloat16)).fingerprint()
    assert one != find_moe_layers(tiny_model("mixtral", seed=1)).fingerprint()


def test_dense_model_is_refused_in_one_line() -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4
    )
    with pytest.raises(ExpertcastError, match="records no router_logits") as caught:
        find_moe_layers(AutoModelForCausalLM.from_config(config))
    assert "\n" not in str(caught.value)


def test_undecorated_experts_are_refused_by_name() -> None:
    model = tiny_model("qwen3_moe")
    for layer in find_moe_layers(model):
        layer.block.experts = torch.nn.Linear(4, 4)
    with pytest.raises(ExpertcastError, match="experts \\(Linear\\) are quantised or not decorated"):
        find_moe_layers(model)


def test_scaled_block_output_is_refused() -> None:
    """A block whose output does not enter the residual stream as it is would make q_l wrong without a word."""
    model = tiny_model("qwen3_moe")
    layer = model.model.layers[1]
    layer.register_forward_hook(lambda _m, _a, output: output * 0.5)
    with pytest.raises(ExpertcastError, match="not simply added"):
        find_moe_layers(model)


def test_missing_model_is_one_line() -> None:
    with pytest.raises(ExpertcastError, match="cannot load model 'no/such/model-here'"):
        meta_model("no/such/model-here")


def test_truncated_weights_are_one_line(tmp_path: Path) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ExpertcastError, match="cannot load model") as caught:
        load_model(str(tmp_path))
    assert "\n" not in str(caught.value)
