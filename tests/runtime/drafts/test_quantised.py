"""A model's experts in few bits: outputs against transformers' kernel over rounded weights, every store."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.moe import batched_mm_experts_forward

import expertcast
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.packed_experts import packed_matrices, run_experts
from expertcast.predictors import MoEView
from expertcast.runtime.drafts.kinds import QuantisedExperts
from expertcast.runtime.storage.disk_store import DiskStore
from expertcast.runtime.storage.store import ExpertStore
from tests.families.models import CONFIGS
from tests.runtime.drafts.by_hand import distance, resident_views, rounded_experts, step


def _wide(family: str, dtype: torch.dtype = torch.bfloat16, width: int = 128) -> tuple[PreTrainedModel, MoEView]:
    config: Any = copy.deepcopy(CONFIGS[family])
    config.hidden_size, config.intermediate_size, config.moe_intermediate_size = width, 64, 64
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("_bias"):
            parameter.data.normal_(std=0.1)
    return model, find_moe_layers(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("precision", ["int4", "int8"])
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "qwen3_moe"])
@torch.no_grad()
def test_outputs(family: str, precision: str, dtype: torch.dtype) -> None:
    """One token and several, within the rounding of inputs to 8 bits; transposed with biases, and not."""
    _, view = _wide(family, dtype)
    layer = QuantisedExperts(view, resident_views(view), precision).layers[2]
    by_hand = rounded_experts(view[2], int(precision[3:]))
    for tokens in (1, 3, 40):
        hidden, ids, weights = step(tokens, 128, 8, 2, seed=tokens)
        expected = batched_mm_experts_forward(by_hand, hidden, ids, weights)
        found = run_experts(layer, hidden.to(dtype), ids, weights.to(dtype))
        assert found.dtype == dtype
        assert distance(found, expected) < 0.015


def _outputs(quantised: QuantisedExperts) -> Tensor:
    hidden, ids, weights = step(2, 128, 8, 2)
    return torch.stack([run_experts(each, hidden.bfloat16(), ids, weights.bfloat16()) for each in quantised.layers])


@pytest.mark.parametrize("precision", ["int4", "int8"])
@pytest.mark.parametrize("kind", ["memory", "raw", "bitsplit"])
@torch.no_grad()
def test_from_every_store(kind: str, precision: str, tmp_path: Path) -> None:
    """The same bits as from the model; the store may go, and the model need not hold its experts."""
    _, view = _wide("gpt_oss")
    expected = _outputs(QuantisedExperts(view, resident_views(view), precision))
    store: ExpertStore
    store = ExpertStore(view) if kind == "memory" else DiskStore(view, tmp_path, codec=kind)
    store.pack(view)
    quantised = QuantisedExperts(view, store.views, precision)
    assert torch.equal(_outputs(quantised), expected)
    store.unpack()
    store.close()
    for layer in view:
        for parameter in layer.experts.parameters():
            parameter.data.zero_()
    assert torch.equal(_outputs(quantised), expected), "it stands by itself"


@torch.no_grad()
def test_from_an_offloaded_model() -> None:
    """Its slots are in the experts' place."""
    model, view = _wide("qwen3_moe")
    expected = _outputs(QuantisedExperts(view, resident_views(view)))
    with expertcast.offload(model, slots=8, link="instant") as offloaded:
        assert torch.equal(_outputs(QuantisedExperts(view, offloaded.store.views)), expected)


@torch.no_grad()
def test_sizes_that_blocks_do_not_divide_stay_in_16_bits() -> None:
    _, view = _wide("mixtral", width=48)
    quantised = QuantisedExperts(view, resident_views(view))
    assert [str(each.form) for each in packed_matrices(quantised.layers[0]).values()] == ["BF16", "Q4_0"]
    hidden, ids, weights = step(3, 48, 8, 2)
    expected = batched_mm_experts_forward(rounded_experts(view[0], 4), hidden, ids, weights)
    assert distance(run_experts(quantised.layers[0], hidden, ids, weights), expected) < 0.015
