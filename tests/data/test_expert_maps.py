"""Stand-ins for MoE layers' outputs: against direct least squares over what each expert was given and gave."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from expertcast.data.batch import RouterCall
from expertcast.data.collect import ActivationStream
from expertcast.data.experts import ResidentExperts
from expertcast.data.means import MeanOutputs
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.plan import Window
from expertcast.data.stand_in import PRIOR_TOKENS, fit_stand_in
from expertcast.data.taps import RouterTaps
from expertcast.predictors import ExpertcastError, MoEView
from tests.families.models import tiny_model

SIZES = (24, 40, 31)
"""Tokens of the windows: batches are padded."""


def windows() -> list[Window]:
    random = np.random.default_rng(1)
    return [Window(number, 0, random.integers(3, 4096, size, dtype=np.int32)) for number, size in enumerate(SIZES)]


@torch.no_grad()
def gathered(model: PreTrainedModel, view: MoEView) -> list[dict[str, Tensor]]:
    """Per layer, every token's input, routing, and what its block put out, one window after another."""
    seen: list[dict[str, list[Tensor]]] = [{name: [] for name in ("input", "ids", "weights", "output")} for _ in view]

    def on_router(call: RouterCall) -> None:
        for name, tensor in (("input", call.router_input_TD), ("ids", call.ids_TK), ("weights", call.weights_TK)):
            seen[call.layer][name].append(tensor)

    def after_block(layer: int, output: Any) -> None:
        block = output[0] if isinstance(output, tuple) else output
        seen[layer]["output"].append(block.reshape(-1, view.shape.hidden))

    handles = [
        each.block.register_forward_hook(lambda _m, _a, output, layer=each.index: after_block(layer, output))
        for each in view
    ]
    with closing(RouterTaps(model, view, on_router)):
        for window in windows():
            model.base_model(input_ids=torch.from_numpy(window.token_ids.astype(np.int64))[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return [{name: torch.cat(parts) for name, parts in layer.items()} for layer in seen]


@torch.no_grad()
def expert_output(experts: nn.Module, expert: int, hidden_TD: Tensor) -> Tensor:
    """One expert alone, by the module itself."""
    ids_T1 = torch.full((len(hidden_TD), 1), expert)
    output: Tensor = experts(hidden_TD, ids_T1, torch.ones(len(hidden_TD), 1))
    return output


def solution(z_TR: Tensor, y_TD: Tensor, spread_Z: Tensor) -> Tensor:
    """Ridge by least squares over the rows and those of the prior, in float64."""
    z_TZ = torch.cat([torch.ones(len(z_TR), 1), z_TR], dim=1).double()
    prior_ZZ = (PRIOR_TOKENS * spread_Z).clamp(min=1e-12).sqrt().diag()
    rows = torch.cat([z_TZ, prior_ZZ])
    return torch.linalg.lstsq(rows, torch.cat([y_TD.double(), torch.zeros(len(prior_ZZ), y_TD.shape[1])])).solution


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "gpt_oss", "deepseek_v2"])
def test_maps_are_the_least_squares_solutions(family: str) -> None:
    """Of every expert, and of what the block adds to them: shared experts."""
    model = tiny_model(family, torch.float32)
    view = find_moe_layers(model)
    stand_in = fit_stand_in(model, view, windows(), rank=4, batch_size=2)
    for layer, seen in zip(view, gathered(model, view), strict=True):
        own = seen["input"]
        centred = own - own.mean(dim=0)
        directions = torch.linalg.svd(centred.double(), full_matrices=False).Vh[:4].T.float()
        found = stand_in.projection_LDR[layer.index]
        assert torch.allclose((found.T @ directions).abs(), torch.eye(4), atol=1e-3)
        z_TR = own @ found - stand_in.centre_LR[layer.index]
        assert float(z_TR.mean(dim=0).abs().max()) < 1e-4 * float(z_TR.std())
        pairs = z_TR.repeat_interleave(view.shape.top_k, dim=0).double()
        spread_Z = torch.cat([torch.tensor([1e-6]), pairs.square().mean(dim=0)])
        routed_TD = torch.zeros_like(own)
        for expert in range(view.shape.experts):
            rows_T, places_T = (seen["ids"] == expert).nonzero(as_tuple=True)
            assert len(rows_T), "each expert is reached"
            y_SD = expert_output(layer.experts, expert, own[rows_T])
            routed_TD.index_add_(0, rows_T, y_SD * seen["weights"][rows_T, places_T][:, None])
            wanted = solution(z_TR[rows_T], y_SD, spread_Z)
            torch.testing.assert_close(stand_in.base_LED[layer.index, expert].double(), wanted[0], rtol=1e-3, atol=1e-4)
            near = stand_in.map_LERD[layer.index, expert].double()
            assert float((near - wanted[1:]).norm()) < 5e-3 * float(wanted[1:].norm()) + 1e-6, "bf16"
        rest_TD = seen["output"] - routed_TD
        if layer.has_shared:
            wanted = solution(z_TR, rest_TD, spread_Z)
            torch.testing.assert_close(stand_in.shared_LD[layer.index].double(), wanted[0], rtol=1e-3, atol=1e-4)
            near = stand_in.shared_map_LRD[layer.index].double()
            assert float((near - wanted[1:]).norm()) < 5e-3 * float(wanted[1:].norm()) + 1e-6
        else:
            assert float(rest_TD.abs().max()) < 1e-3
            assert not stand_in.shared_LD[layer.index].any()
        one = stand_in.output(layer.index, own, seen["ids"], seen["weights"])
        few = [stand_in.output(layer.index, *(seen[name][:5] for name in ("input", "ids", "weights")))]
        torch.testing.assert_close(one[:5], few[0], rtol=1e-4, atol=1e-5)
        mean_off = (seen["output"] - seen["output"].mean(dim=0)).square().sum()
        assert float((seen["output"] - one).square().sum()) < 0.9 * float(mean_off), "better than one mean for all"


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe_lite"])
def test_rank_0_are_default_vectors(family: str) -> None:
    model = tiny_model(family, torch.float32)
    view = find_moe_layers(model)
    means = MeanOutputs(view)
    for _ in ActivationStream(model, view, windows(), batch_size=2, means=means):
        pass
    defaults = means.default_vectors(ResidentExperts(model, view))
    stand_in = fit_stand_in(model, view, windows(), rank=0, batch_size=2)
    torch.testing.assert_close(stand_in.base_LED, defaults.expert_LED, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(stand_in.shared_LD, defaults.shared_LD, rtol=1e-4, atol=1e-5)
    assert stand_in.rank == 0


def test_the_model_is_left_as_it_was_and_odd_ranks_are_refused() -> None:
    model = tiny_model("qwen2_moe").train()
    view, before = find_moe_layers(model), model.get_experts_implementation()
    hooks = [len(module._forward_hooks) for module in model.modules()]
    fit_stand_in(model, view, windows()[:1], rank=1)
    assert model.training
    assert model.get_experts_implementation() == before
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    with pytest.raises(ExpertcastError, match="rank=33: give 0 to 32 directions"):
        fit_stand_in(model, view, windows(), rank=33)
