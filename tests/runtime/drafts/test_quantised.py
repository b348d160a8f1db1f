"""A model's experts in few bits: outputs against transformers' kernel over weights rounded by hand, every store."""

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
from expertcast.predictors import ExpertcastError, MoEView
from expertcast.runtime.drafts import quantised as matrices
from expertcast.runtime.drafts.quantised import (
    BITS,
    CALIBRATED,
    ENOUGH,
    Calibration,
    ModelWeights,
    QuantisedExperts,
    squared_error,
)
from expertcast.runtime.storage.disk_store import DiskStore
from expertcast.runtime.storage.store import ExpertStore
from tests.families.models import CONFIGS, tiny_model
from tests.runtime.drafts.by_hand import distance, rounded_experts, rounded_weights, step

WIDE = ("gpt_oss", "mixtral", "qwen3_moe")
"""Transposed with biases, and not."""


def _wide(family: str, dtype: torch.dtype = torch.bfloat16) -> tuple[PreTrainedModel, MoEView]:
    """Sizes that groups of 128 and 64 inputs divide."""
    config: Any = copy.deepcopy(CONFIGS[family])
    config.hidden_size, config.intermediate_size, config.moe_intermediate_size = 128, 64, 64
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("_bias"):
            parameter.data.normal_(std=0.1)
    return model, find_moe_layers(model)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("precision", ["int4", "int8"])
@pytest.mark.parametrize("family", WIDE)
@torch.no_grad()
def test_outputs(
    family: str, precision: str, dtype: torch.dtype, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token and several, with torch's kernels and without, within the rounding of bf16."""
    if not kernels:
        for kernel in (matrices.FourBitKernel, matrices.EightBitKernel):
            monkeypatch.setattr(kernel, "takes", lambda *_args: False)
    _, view = _wide(family, dtype)
    quantised = QuantisedExperts.of(view, ModelWeights(view), precision)
    rounded = rounded_experts(view[2], BITS[precision])
    for tokens in (1, 3, 8):
        hidden, ids, weights = step(tokens, 128, 8, 2, seed=tokens)
        expected = batched_mm_experts_forward(rounded, hidden, ids, weights)
        found = quantised.run(view[2], hidden.to(dtype), ids, weights.to(dtype))
        assert found.dtype == dtype
        full = not kernels and dtype == torch.float32
        assert distance(found, expected) < (1e-5 if full else 0.012)


@torch.no_grad()
def test_rows_do_not_depend_on_each_other() -> None:
    """Tokens that share experts, and an expert that all tokens share."""
    _, view = _wide("qwen3_moe")
    quantised = QuantisedExperts.of(view, ModelWeights(view))
    hidden, _, weights = step(6, 128, 8, 2)
    ids = torch.tensor([[5, 1], [5, 2], [1, 5], [5, 7], [0, 5], [5, 1]])
    together = quantised.run(view[0], hidden.bfloat16(), ids, weights.bfloat16())
    for row in range(6):
        one = slice(row, row + 1)
        alone = quantised.run(view[0], hidden[one].bfloat16(), ids[one], weights[one].bfloat16())
        assert distance(together[one], alone) < 0.01


def test_bytes() -> None:
    """4 layers of 8 experts, 128 x 128 and 128 x 64. 4 bits in groups of 128 and 64, with the kernel 4 bytes each as
    zeros come with the scales; 17/64 and 9/32 of bf16's. Biases as they are: 128 and 128 values."""
    _, view = _wide("gpt_oss")
    experts = 4 * 8
    biases = experts * 256 * 2
    codes, scales = 128 * 128 + 128 * 64, 128 + 128
    assert QuantisedExperts.of(view, ModelWeights(view), "int8").nbytes == biases + experts * (codes + scales * 2)
    with_zeros = {False: 2, True: 4}[matrices.FourBitKernel.takes(128, 128, torch.device("cpu"))]
    expected = biases + experts * (codes // 2 + scales * with_zeros)
    assert QuantisedExperts.of(view, ModelWeights(view), "int4").nbytes == expected
    whole = sum(value.nbytes for layer in view for value in ModelWeights(view).views(layer.index).values())
    assert expected - biases <= 0.271 * (whole - biases)


def _outputs(view: MoEView, quantised: QuantisedExperts) -> Tensor:
    hidden, ids, weights = step(2, 128, 8, 2)
    runs = [quantised.run(layer, hidden.bfloat16(), ids, weights.bfloat16()) for layer in view]
    return torch.stack(runs)


@pytest.mark.parametrize("precision", ["int4", "int8"])
@pytest.mark.parametrize("kind", ["memory", "raw", "bitsplit"])
@torch.no_grad()
def test_from_every_store(kind: str, precision: str, tmp_path: Path) -> None:
    """The same bits as from the model; the store may go, and the model need not hold its experts."""
    _, view = _wide("gpt_oss")
    expected = _outputs(view, QuantisedExperts.of(view, ModelWeights(view), precision))
    store: ExpertStore
    store = ExpertStore(view) if kind == "memory" else DiskStore(view, tmp_path, codec=kind)
    store.pack(view)
    quantised = QuantisedExperts.of(view, store, precision)
    assert torch.equal(_outputs(view, quantised), expected)
    store.unpack()
    store.close()
    for layer in view:
        for parameter in layer.experts.parameters():
            parameter.data.zero_()
    assert torch.equal(_outputs(view, quantised), expected), "it stands by itself"


@torch.no_grad()
def test_from_an_offloaded_model() -> None:
    """Its slots are in the experts' place; text is run through it for a calibration."""
    model, view = _wide("qwen3_moe")
    ids = torch.randint(3, 4096, (2, 40), generator=torch.Generator().manual_seed(0))
    resident = Calibration.of(model, view, ids)
    expected = _outputs(view, QuantisedExperts.of(view, ModelWeights(view), CALIBRATED, calibration=resident))
    with expertcast.offload(model, slots=8, link="instant") as offloaded:
        calibration = Calibration.of(model, view, ids)
        quantised = QuantisedExperts.of(view, offloaded.store, CALIBRATED, calibration=calibration)
        assert all(map(torch.equal, calibration.hidden_TD, resident.hidden_TD))
        assert all(map(torch.equal, calibration.ids_TK, resident.ids_TK))
    assert torch.equal(_outputs(view, quantised), expected)


@torch.no_grad()
def test_calibration_sees_what_the_experts_are_given() -> None:
    """The inputs of the first layer's experts, by the model's own modules; one that saw too few tokens gets all."""
    model, view = _wide("mixtral")
    ids = torch.randint(3, 4096, (3, 50), generator=torch.Generator().manual_seed(0))
    calibration = Calibration.of(model, view, ids, batch=2)
    seen: list[Tensor] = []
    handle = view[0].norm.register_forward_hook(lambda _m, _args, output: seen.append(output.reshape(-1, 128)))
    model(input_ids=ids[:2])
    model(input_ids=ids[2:])
    handle.remove()
    assert torch.equal(calibration.hidden_TD[0], torch.cat(seen))
    assert torch.equal(calibration.ids_TK[0], view[0].routed(torch.cat(seen))[2])
    counts = [sum(expert in row for row in calibration.ids_TK[0].tolist()) for expert in range(8)]
    assert min(counts) < ENOUGH
    for expert, count in enumerate(counts):
        assert len(calibration.inputs(0, expert)) == (count if count >= ENOUGH else 150)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
@torch.no_grad()
def test_calibrated_experts_err_less_on_the_text(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both projections of every expert, on what it was given: never more than rounded to nearest, in sum far less. The
    activations between are made here by the experts' own code with full weights."""
    for kernel in (matrices.FourBitKernel, matrices.EightBitKernel):
        monkeypatch.setattr(kernel, "takes", lambda *_args: False)
    model, view = _wide(family, torch.float32)
    ids = torch.randint(3, 4096, (8, 64), generator=torch.Generator().manual_seed(0))
    calibration = Calibration.of(model, view, ids)
    quantised = QuantisedExperts.of(view, ModelWeights(view), CALIBRATED, calibration=calibration)
    layer = view[1]
    experts: Any = layer.experts
    for name, projection in zip(("gate_up_proj", "down_proj"), quantised._layers[1], strict=True):
        weights = getattr(experts, name).detach()
        weights = weights.mT if experts.is_transposed else weights
        error, nearest = 0.0, 0.0
        for expert in range(8):
            rows = calibration.inputs(1, expert)
            if name == "down_proj":
                up = experts.gate_up_proj[expert]
                bias = experts.gate_up_proj_bias[expert] if experts.has_bias else 0
                rows = experts._apply_gate(rows @ (up if experts.is_transposed else up.T) + bias)
            found = projection.matrices.products(torch.eye(weights.shape[-1]), [(expert, weights.shape[-1])]).T
            both = torch.stack((found, rounded_weights(weights[expert], 4)))
            of_rows, by_nearest = squared_error(weights[expert][None], both, rows.T @ rows)
            assert bool((of_rows <= by_nearest * 1.001 + 1e-6).all())
            error, nearest = error + float(of_rows.sum()), nearest + float(by_nearest.sum())
        assert error < 0.9 * nearest


def test_what_is_refused() -> None:
    view = find_moe_layers(tiny_model("olmoe"))
    with pytest.raises(ExpertcastError, match="unknown precision 'int3' of a draft: choose from int8, int4, int4:cal"):
        QuantisedExperts.of(view, ModelWeights(view), "int3")
    with pytest.raises(ExpertcastError, match=r"'int4:calibrated' needs a text: give calibration=Calibration\.of"):
        QuantisedExperts.of(view, ModelWeights(view), CALIBRATED)
