"""A model's experts in few bits: outputs against transformers' kernel over weights rounded by hand, every store."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.moe import batched_mm_experts_forward

import expertcast
from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors import ExpertcastError, MoEView
from expertcast.runtime.drafts.quantised import (
    BITS,
    CALIBRATED,
    DAMPING,
    ENOUGH,
    Calibration,
    Coded,
    Matrices,
    QuantisedExperts,
    compensated,
    eight_bits,
    four_bits,
    group_of,
    rounded,
    squared_error,
)
from expertcast.runtime.storage.disk_store import DiskStore
from expertcast.runtime.storage.store import ExpertStore
from tests.families.models import CONFIGS, tiny_model
from tests.runtime.drafts.by_hand import bf16, distance, resident_views, rounded_experts, rounded_weights, step

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("precision", ["int4", "int8"])
@pytest.mark.parametrize("family", WIDE)
@torch.no_grad()
def test_outputs(family: str, precision: str, dtype: torch.dtype) -> None:
    """One token and several, within the rounding of bf16."""
    _, view = _wide(family, dtype)
    quantised = QuantisedExperts.of(view, resident_views(view), precision)
    by_hand = rounded_experts(view[2], BITS[precision])
    for tokens in (1, 3, 8):
        hidden, ids, weights = step(tokens, 128, 8, 2, seed=tokens)
        expected = batched_mm_experts_forward(by_hand, hidden, ids, weights)
        found = quantised.run(view[2], hidden.to(dtype), ids, weights.to(dtype))
        assert found.dtype == dtype
        assert distance(found, expected) < 0.012


@torch.no_grad()
def test_rows_do_not_depend_on_each_other() -> None:
    """Tokens that share experts, and an expert that all tokens share."""
    _, view = _wide("qwen3_moe")
    quantised = QuantisedExperts.of(view, resident_views(view))
    hidden, _, weights = step(6, 128, 8, 2)
    ids = torch.tensor([[5, 1], [5, 2], [1, 5], [5, 7], [0, 5], [5, 1]])
    together = quantised.run(view[0], hidden.bfloat16(), ids, weights.bfloat16())
    for row in range(6):
        one = slice(row, row + 1)
        alone = quantised.run(view[0], hidden[one].bfloat16(), ids[one], weights[one].bfloat16())
        assert distance(together[one], alone) < 0.01


def test_bytes() -> None:
    """4 layers of 8 experts, 128 x 128 and 128 x 64. 4 bits in groups of 128 and 64, 4 bytes each as
    zeros come with the scales; 17/64 and 9/32 of bf16's. Biases as they are: 128 and 128 values."""
    _, view = _wide("gpt_oss")
    experts = 4 * 8
    biases = experts * 256 * 2
    codes, scales = 128 * 128 + 128 * 64, 128 + 128
    assert QuantisedExperts.of(view, resident_views(view), "int8").nbytes == biases + experts * (codes + scales * 2)
    expected = biases + experts * (codes // 2 + scales * 4)
    assert QuantisedExperts.of(view, resident_views(view), "int4").nbytes == expected
    whole = sum(value.nbytes for layer in view for value in resident_views(view)(layer.index).values())
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
    expected = _outputs(view, QuantisedExperts.of(view, resident_views(view), precision))
    store: ExpertStore
    store = ExpertStore(view) if kind == "memory" else DiskStore(view, tmp_path, codec=kind)
    store.pack(view)
    quantised = QuantisedExperts.of(view, store.views, precision)
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
    expected = _outputs(view, QuantisedExperts.of(view, resident_views(view), CALIBRATED, calibration=resident))
    with expertcast.offload(model, slots=8, link="instant") as offloaded:
        calibration = Calibration.of(model, view, ids)
        quantised = QuantisedExperts.of(view, offloaded.store.views, CALIBRATED, calibration=calibration)
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
def test_calibrated_experts_err_less_on_the_text(family: str) -> None:
    """Both projections of every expert, on what it was given: never more than rounded to nearest, in sum far less. The
    activations between are made here by the experts' own code with full weights."""
    model, view = _wide(family, torch.float32)
    ids = torch.randint(3, 4096, (8, 64), generator=torch.Generator().manual_seed(0))
    calibration = Calibration.of(model, view, ids)
    quantised = QuantisedExperts.of(view, resident_views(view), CALIBRATED, calibration=calibration)
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
            assert bool((of_rows <= by_nearest * 1.05 + 1e-6).all()), "products are in bf16"
            error, nearest = error + float(of_rows.sum()), nearest + float(by_nearest.sum())
        assert error < 0.9 * nearest


def test_what_is_refused() -> None:
    view = find_moe_layers(tiny_model("olmoe"))
    with pytest.raises(ExpertcastError, match="unknown precision 'int3' of a draft: choose from int8, int4, int4:cal"):
        QuantisedExperts.of(view, resident_views(view), "int3")
    with pytest.raises(ExpertcastError, match=r"'int4:calibrated' needs a text: give calibration=Calibration\.of"):
        QuantisedExperts.of(view, resident_views(view), CALIBRATED)


def test_a_group_by_hand() -> None:
    """-3 is the extreme of the first group: scale -3 / -8 = 0.375, exactly a bf16 value. 1.1 / 0.375 = 2.93 -> 3,
    0.5 / 0.375 = 1.33 -> 1, 2.9 / 0.375 = 7.73 -> 8, of which 4 bits have 7. The second group's extreme is +2: scale
    2 / -8 = -0.25; 2 is -8 of it, -1.9 / -0.25 = 7.6 -> 8 -> 7, 0.3 / -0.25 = -1.2 -> -1. Zeros: scale 0."""
    weights = torch.tensor([[-3.0, 1.1, 0.5, 2.9, 2.0, -1.9, 0.3, 0.0, 0.0, 0.0, 0.0, 0.0]])
    coded = rounded(weights, 4)
    assert (coded.codes.int() - 8).tolist() == [[-8, 3, 1, 7, -8, 7, -1, 0, 0, 0, 0, 0]]
    assert coded.scales.tolist() == [[0.375, -0.25, 0.0]]
    assert coded.expanded().tolist() == [[-3.0, 1.125, 0.375, 2.625, 2.0, -1.75, 0.25, 0, 0, 0, 0, 0]]


CPU = torch.device("cpu")
GROUPS = [(3, 2), (0, 1), (4, 4)]
"""Rows of the experts 3, 0 and 4."""


def _matrices(weights_ENI: Tensor, bits: int, device: torch.device = CPU) -> Matrices:
    group = group_of(*weights_ENI.shape[1:], bits)
    assert group is not None
    weights_ENI = weights_ENI.to(device)
    if bits == 8:
        return eight_bits(lambda experts: weights_ENI[experts], weights_ENI.shape, device)
    chunks = (rounded(weights_ENI[first : first + 2], group) for first in range(0, len(weights_ENI), 2))
    return four_bits(chunks, group, device)


@pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [(32, 32), (48, 192), (64, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products(bits: int, size: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    """Within the rounding of bf16, in which the kernels compute."""
    if device.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    draw = torch.Generator().manual_seed(bits)
    weights, rows = torch.randn(5, *size, generator=draw), torch.randn(7, size[1], generator=draw).to(dtype)
    expected = rounded_weights(weights, bits).double()
    parts = torch.split(rows.double(), [count for _, count in GROUPS])
    wanted = torch.cat([part @ expected[each].T for part, (each, _) in zip(parts, GROUPS, strict=True)])
    found = _matrices(weights, bits, device).products(rows.to(device), GROUPS).cpu()
    assert found.dtype == dtype
    assert distance(found, wanted) < 6e-3


def test_sizes_that_the_kernels_take() -> None:
    """4 bits: 16 outputs at a time. 8 bits: whole vectors of 32 inputs and 4 outputs; any others it reads beyond."""
    sizes = [(4, 32, 64), (4, 32, 48), (4, 24, 64), (8, 20, 64), (8, 30, 64), (8, 32, 48)]
    found = [group_of(outputs, inputs, bits) for bits, outputs, inputs in sizes]
    assert found == [64, None, None, 64, None, None]


def test_every_code_comes_back() -> None:
    """Rows of the identity give the weights themselves: all 16 codes, and 255, with a scale of 1/4."""
    eye = torch.eye(64, dtype=torch.bfloat16)
    codes = torch.arange(32 * 64).view(1, 32, 64)
    four = Coded(codes.remainder(16).to(torch.uint8), torch.full((1, 32, 1), 0.25))
    found = four_bits([four], 64, CPU).products(eye, [(0, 64)])
    assert torch.equal(found.float(), four.expanded()[0].T)
    weights = (codes.remainder(255) - 127) * 0.25
    weights[:, :, 0] = 127 * 0.25
    assert torch.equal(_matrices(weights, 8).products(eye, [(0, 64)]).float(), weights[0].T)


def test_bytes_are_those_of_the_tensors() -> None:
    """5 experts of 64 x 256. 4 bits: half a byte each, and 2 groups of a scale and a zero. 8 bits: a byte each, and 64
    scales."""
    assert _matrices(torch.ones(5, 64, 256), 4).nbytes == 5 * (64 * 128 + 64 * 2 * 4)
    assert _matrices(torch.ones(5, 64, 256), 8).nbytes == 5 * (64 * 256 + 64 * 2)


def _inputs(rows: int, inputs: int, seed: int = 0) -> Tensor:
    """Correlated, as activations are."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, inputs, generator=draw) @ torch.randn(inputs, inputs, generator=draw)


def _textbook(weights: list[float], hessian: Tensor, group: int) -> list[float]:
    """The weights that one output's are rounded to, every inverse made anew."""
    damped = hessian.double().numpy() + DAMPING * float(hessian.double().diagonal().mean()) * np.eye(len(weights))
    left, found, scale = np.array(weights, dtype=np.float64), [], 1.0
    for i in range(len(left)):
        if i % group == 0:
            scale = bf16(max(left[i : i + group], key=abs) / -8) or 1.0
        value = scale * min(max(round(left[i] / scale), -8), 7)
        inverse = np.linalg.inv(damped[i:, i:])
        left[i:] -= (left[i] - value) / inverse[0, 0] * inverse[:, 0]
        found.append(value)
    return found


@pytest.mark.parametrize("group", [4, 12])
def test_as_the_textbook_has_it(group: int) -> None:
    weights = torch.randn(2, 10, 12, generator=torch.Generator().manual_seed(1))
    hessians = torch.stack([(rows := _inputs(40, 12, seed)).T @ rows for seed in (2, 3)])
    found = compensated(weights, hessians, group).expanded()
    nearest = rounded(weights, group).expanded()
    better = 0
    for expert in range(2):
        for output in range(10):
            textbook = torch.tensor(_textbook(weights[expert, output].tolist(), hessians[expert], group))
            both = torch.stack((textbook, nearest[expert, output]))
            errors = squared_error(weights[expert, output][None], both, hessians[expert])
            better += int(errors[0] < errors[1])
            assert found[expert, output] == pytest.approx(both[int(errors.argmin())], rel=1e-6)
    assert better > 10, "most outputs gain"


def test_by_hand() -> None:
    """Scale -8 / -8 = 1. Inputs 2 and 3 are always the same: rounded by themselves, .4 and .4 are 0 and 0, .8 short;
    when the first is 0, the second takes its .4 and is rounded to 1, .2 too much."""
    rows = torch.randn(1000, 2, generator=torch.Generator().manual_seed(0)) @ torch.tensor([[1.0, 0, 0], [0, 1, 1]])
    weights, hessians = torch.tensor([[[-8.0, 0.4, 0.4]]]), (rows.T @ rows)[None]
    assert rounded(weights, 3).expanded().tolist() == [[[-8.0, 0.0, 0.0]]]
    assert compensated(weights, hessians, 3).expanded().tolist() == [[[-8.0, 0.0, 1.0]]]


@pytest.mark.parametrize("rows", [1, 5, 500])
def test_no_output_is_worse_than_rounded_to_nearest(rows: int) -> None:
    """Few inputs too, whose H has no inverse. The error is that of the products themselves."""
    weights = torch.randn(1, 64, 96, generator=torch.Generator().manual_seed(rows))
    given = _inputs(rows, 96, rows)
    hessian = (given.T @ given)[None]
    error = {}
    for name, coded in (("calibrated", compensated(weights, hessian, 32)), ("nearest", rounded(weights, 32))):
        error[name] = (given.double() @ (weights - coded.expanded())[0].double().T).square().sum(dim=0)
    assert bool((error["calibrated"] <= error["nearest"] * (1 + 1e-4)).all())
    assert float(error["calibrated"].sum()) < 0.7 * float(error["nearest"].sum())


def test_inputs_that_tell_nothing_round_to_nearest() -> None:
    """Uncorrelated inputs of the same size leave nothing to make good; no inputs at all count as those."""
    weights = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))
    hessians = torch.stack((torch.eye(32) * 3, torch.zeros(32, 32)))
    found, expected = compensated(weights, hessians, 32), rounded(weights, 32)
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.scales, expected.scales)
