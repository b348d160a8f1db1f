"""Discovery, routing rule and the inspect report on every family, and the refusals."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from expertcast.data.capture import ActivationStream
from expertcast.data.experts import ResidentExperts
from expertcast.data.means import MeanOutputs
from expertcast.data.moe_layers import experts_implementation, find_moe_layers
from expertcast.data.plan import Window
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import Adds
from tests.families.models import CONFIGS, DENSE_LAYERS, SHARED, tiny_model
from tests.families.page import describe
from tests.families.table import tiny_family
from tests.runtime.quantised import inspect_model


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


def test_fingerprint_tells_models_apart_and_ignores_dtype() -> None:
    one = find_moe_layers(tiny_model("mixtral", torch.float32)).fingerprint()
    assert one == find_moe_layers(tiny_model("mixtral", torch.bfloat16)).fingerprint()
    assert one != find_moe_layers(tiny_model("mixtral", seed=1)).fingerprint()


def test_undecorated_experts_are_refused_by_name() -> None:
    model = tiny_model("qwen3_moe")
    for layer in find_moe_layers(model):
        layer.block.experts = torch.nn.Linear(4, 4)
    with pytest.raises(ExpertcastError, match="experts \\(Linear\\) are quantised or not decorated"):
        find_moe_layers(model)


@pytest.mark.parametrize("scale", [0.02, 1.0])
def test_what_the_layer_does_to_its_experts_output_is_seen(scale: float) -> None:
    """However small the output is beside the residual: no values are compared."""
    model = tiny_model("qwen3_moe")
    layers = model.model.layers
    layers[0].mlp.experts.down_proj.data *= scale
    layers[0].mlp.register_forward_hook(lambda _m, _a, output: output * 0.5 - output * 0.25)
    layers[1].register_forward_hook(lambda _m, _a, output: output * 0.5)
    layers[2].register_forward_hook(lambda _m, args, output: output + 2 * args[0].float().sin().to(output.dtype))
    layers[3].mlp.register_forward_hook(lambda _m, _a, output: output.tanh())
    for found in (model, _on_meta(model)):
        adds = [layer.adds for layer in find_moe_layers(found)]
        assert adds == [Adds(0.25), None, Adds(beside=True), None]


def _on_meta(model: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(model).to("meta")


def test_default_vectors_are_what_a_layer_adds(tmp_path: Path) -> None:
    """With a factor behind the block, and something added beside it: the sum of both is the mean step."""
    model = tiny_family("granitemoe").float()
    view = find_moe_layers(model)
    assert [layer.adds for layer in view] == [Adds(0.25)] * 3
    means = MeanOutputs(view)
    windows = [Window(0, 0, np.arange(3, 40))]
    stream = ActivationStream(model, view, windows, means=means, residual_dtype=torch.float32)
    (batch,) = stream
    defaults = means.default_vectors(ResidentExperts(model, view))
    for layer in list(view)[:-1]:
        ids_TK, weights_TK = layer.route(batch.logits_TLE[:, layer.index])
        routed = torch.zeros(37, 32)
        with experts_implementation(model, "eager"), torch.no_grad():
            hidden_TD = layer.router_input(batch.residual_TLD[:, layer.index])
            routed += layer.experts(hidden_TD, ids_TK, weights_TK) * 0.25
            ones_T1 = torch.ones(37, 1)
            for expert in range(8):
                took_T = (ids_TK == expert).any(-1)
                if took_T.any():
                    all_TD = layer.experts(
                        hidden_TD[took_T], torch.full((int(took_T.sum()), 1), expert), ones_T1[took_T]
                    )
                    torch.testing.assert_close(
                        defaults.expert_LED[layer.index, expert], 0.25 * all_TD.mean(0), rtol=1e-3, atol=1e-4
                    )
        step_D = (batch.residual_TLD[:, layer.index + 1] - batch.residual_TLD[:, layer.index]).mean(0)
        torch.testing.assert_close(defaults.shared_LD[layer.index], step_D - routed.mean(0), rtol=1e-3, atol=1e-4)
