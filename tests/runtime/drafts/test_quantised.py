"""A model's experts in few bits: outputs against transformers' kernel over weights rounded by hand, every store."""

from __future__ import annotations

import copy
from collections.abc import Iterator
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
    CodedMatrices,
    EightBitKernel,
    FourBitKernel,
    Matrices,
    QuantisedExperts,
    WholeMatrices,
    coded_matrices,
    compensated,
    expanded,
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
def test_outputs(family: str, precision: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token and several, with torch's kernels and without, within the rounding of bf16."""
    _, view = _wide(family, dtype)
    rounded = rounded_experts(view[2], BITS[precision])
    for kernels in (True, False):
        if not kernels:
            _without_kernels(monkeypatch)
        quantised = QuantisedExperts.of(view, resident_views(view), precision)
        for tokens in (1, 3, 8):
            hidden, ids, weights = step(tokens, 128, 8, 2, seed=tokens)
            expected = batched_mm_experts_forward(rounded, hidden, ids, weights)
            found = quantised.run(view[2], hidden.to(dtype), ids, weights.to(dtype))
            assert found.dtype == dtype
            full = not kernels and dtype == torch.float32
            assert distance(found, expected) < (1e-5 if full else 0.012)


def _without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in (FourBitKernel, EightBitKernel):
        monkeypatch.setattr(kernel, "takes", lambda *_args: False)


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
    """4 layers of 8 experts, 128 x 128 and 128 x 64. 4 bits in groups of 128 and 64, with the kernel 4 bytes each as
    zeros come with the scales; 17/64 and 9/32 of bf16's. Biases as they are: 128 and 128 values."""
    _, view = _wide("gpt_oss")
    experts = 4 * 8
    biases = experts * 256 * 2
    codes, scales = 128 * 128 + 128 * 64, 128 + 128
    assert QuantisedExperts.of(view, resident_views(view), "int8").nbytes == biases + experts * (codes + scales * 2)
    with_zeros = {False: 2, True: 4}[FourBitKernel.takes(128, 128, torch.device("cpu"))]
    expected = biases + experts * (codes // 2 + scales * with_zeros)
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
def test_calibrated_experts_err_less_on_the_text(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both projections of every expert, on what it was given: never more than rounded to nearest, in sum far less. The
    activations between are made here by the experts' own code with full weights."""
    _without_kernels(monkeypatch)
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
            assert bool((of_rows <= by_nearest * 1.001 + 1e-6).all())
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
    2 / -8 = -0.25; 2 is -8 of it, -1.9 / -0.25 = 7.6 -> 8 -> 7, 0.3 / -0.25 = -1.2 -> -1. Zeros: scale 1."""
    weights = torch.tensor([[-3.0, 1.1, 0.5, 2.9, 2.0, -1.9, 0.3, 0.0, 0.0, 0.0, 0.0, 0.0]])
    codes, scales = rounded(weights, bits=4, group=4)
    assert codes.dtype == torch.int8
    assert codes.tolist() == [[-8, 3, 1, 7, -8, 7, -1, 0, 0, 0, 0, 0]]
    assert scales.tolist() == [[0.375, -0.25, 1.0]]
    assert expanded(codes, scales).tolist() == [[-3.0, 1.125, 0.375, 2.625, 2.0, -1.75, 0.25, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_group_is_rounded_as_by_hand(bits: int, dtype: torch.dtype) -> None:
    weights = torch.randn(3, 6, 256, generator=torch.Generator().manual_seed(bits)).to(dtype)
    codes, scales = rounded(weights, bits, group_of(256, bits) or 0)
    assert scales.shape == (3, 6, 2 if bits == 4 else 1)
    assert torch.equal(scales, scales.bfloat16().float())
    assert torch.equal(expanded(codes, scales), rounded_weights(weights, bits))


CPU = torch.device("cpu")
GROUPS = [(3, 2), (0, 1), (4, 4)]
"""Rows of the experts 3, 0 and 4."""


def _codes(outputs: int, inputs: int, bits: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(outputs + bits)
    group = group_of(inputs, bits) or 0
    return [rounded(torch.randn(outputs, inputs, generator=draw), bits, group) for _ in range(5)]


def _expected(rows: Tensor, coded: list[tuple[Tensor, Tensor]]) -> Tensor:
    parts = torch.split(rows.double(), [count for _, count in GROUPS])
    return torch.cat([part @ expanded(*coded[each]).double().T for part, (each, _) in zip(parts, GROUPS, strict=True)])


def _both(coded: list[tuple[Tensor, Tensor]], bits: int, device: torch.device = CPU) -> Iterator[Matrices]:
    there = [(codes.to(device), scales.to(device)) for codes, scales in coded]
    outputs, inputs = coded[0][0].shape
    yield CodedMatrices(iter(there), bits)
    yield coded_matrices(iter(there), bits, outputs, inputs, device)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [(32, 32), (48, 192), (64, 256), (20, 96), (30, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products(bits: int, size: tuple[int, int], dtype: torch.dtype) -> None:
    """Within the rounding of bf16, in which the kernels compute; without a kernel fp32 is fp32."""
    outputs, inputs = size
    coded = _codes(outputs, inputs, bits)
    rows = torch.randn(7, inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    for matrices in _both(coded, bits):
        found = matrices.products(rows, GROUPS)
        assert found.dtype == dtype
        exact = dtype == torch.float32 and isinstance(matrices, CodedMatrices)
        assert distance(found, _expected(rows, coded)) < (1e-6 if exact else 4e-3)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="no fast kernels here")
def test_which_kernel_runs() -> None:
    """4 bits: 16 outputs at a time. 8 bits: whole vectors of 32 inputs and 4 outputs; any others it reads beyond."""
    chosen = {
        (bits, outputs, inputs): type(coded_matrices(iter(_codes(outputs, inputs, bits)), bits, outputs, inputs, CPU))
        for bits, outputs, inputs in ((4, 32, 64), (4, 24, 64), (8, 20, 64), (8, 30, 64), (8, 32, 48))
    }
    assert chosen == {
        (4, 32, 64): FourBitKernel,
        (4, 24, 64): CodedMatrices,
        (8, 20, 64): EightBitKernel,
        (8, 30, 64): CodedMatrices,
        (8, 32, 48): CodedMatrices,
    }


def test_every_code_comes_back() -> None:
    """Rows of the identity give the weights themselves: all 16 codes, and all 256, with a scale of 1/4."""
    for bits, lowest in ((4, -8), (8, -128)):
        codes = torch.arange(32 * 64).view(32, 64).remainder(2**bits).add(lowest).to(torch.int8)
        scales = torch.full((32, 1), 0.25)
        for matrices in _both([(codes, scales)], bits):
            found = matrices.products(torch.eye(64, dtype=torch.bfloat16), [(0, 64)])
            assert torch.equal(found.float(), codes.float().T * 0.25)


def test_bytes_are_those_of_the_tensors() -> None:
    """5 experts of 64 x 256. 4 bits: half a byte each, and 2 groups; a scale is 2 bytes, and the kernel takes a zero
    with it. 8 bits: a byte each, and 64 scales."""
    assert CodedMatrices(_codes(64, 256, 4), 4).nbytes == 5 * (64 * 128 + 64 * 2 * 2)
    assert FourBitKernel(_codes(64, 256, 4), CPU).nbytes == 5 * (64 * 128 + 64 * 2 * 4)
    for matrices in _both(_codes(64, 256, 8), 8):
        assert matrices.nbytes == 5 * (64 * 256 + 64 * 2)
    assert WholeMatrices(torch.zeros(5, 64, 24, dtype=torch.bfloat16)).nbytes == 5 * 64 * 24 * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("bits", [4, 8])
def test_on_cuda(bits: int) -> None:
    device = torch.device("cuda")
    for outputs, inputs in ((32, 32), (64, 192), (256, 1024)):
        coded = _codes(outputs, inputs, bits)
        rows = torch.randn(7, inputs, generator=torch.Generator().manual_seed(0)).bfloat16()
        for matrices in _both(coded, bits, device):
            found = matrices.products(rows.to(device), GROUPS).cpu()
            assert distance(found, _expected(rows, coded)) < 6e-3


def _inputs(rows: int, inputs: int, seed: int = 0) -> Tensor:
    """Correlated, as activations are."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, inputs, generator=draw) @ torch.randn(inputs, inputs, generator=draw)


def _textbook(weights: list[float], hessian: Tensor, bits: int, group: int) -> list[float]:
    """The weights that one output's are rounded to, every inverse made anew."""
    damped = hessian.double().numpy() + DAMPING * float(hessian.double().diagonal().mean()) * np.eye(len(weights))
    left, found, lowest, scale = np.array(weights, dtype=np.float64), [], -(2 ** (bits - 1)), 1.0
    for i in range(len(left)):
        if i % group == 0:
            scale = bf16(max(left[i : i + group], key=abs) / lowest) or 1.0
        value = scale * min(max(round(left[i] / scale), lowest), -lowest - 1)
        inverse = np.linalg.inv(damped[i:, i:])
        left[i:] -= (left[i] - value) / inverse[0, 0] * inverse[:, 0]
        found.append(value)
    return found


@pytest.mark.parametrize(("bits", "group"), [(4, 4), (4, 12), (8, 12)])
def test_as_the_textbook_has_it(bits: int, group: int) -> None:
    weights = torch.randn(2, 10, 12, generator=torch.Generator().manual_seed(1))
    hessians = torch.stack([(rows := _inputs(40, 12, seed)).T @ rows for seed in (2, 3)])
    found = expanded(*compensated(weights, hessians, bits, group))
    nearest = expanded(*rounded(weights, bits, group))
    better = 0
    for expert in range(2):
        for output in range(10):
            textbook = torch.tensor(_textbook(weights[expert, output].tolist(), hessians[expert], bits, group))
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
    assert expanded(*rounded(weights, 4, 3)).tolist() == [[[-8.0, 0.0, 0.0]]]
    assert expanded(*compensated(weights, hessians, 4, 3)).tolist() == [[[-8.0, 0.0, 1.0]]]


@pytest.mark.parametrize("rows", [1, 5, 500])
def test_no_output_is_worse_than_rounded_to_nearest(rows: int) -> None:
    """Few inputs too, whose H has no inverse. The error is that of the products themselves."""
    weights = torch.randn(1, 64, 96, generator=torch.Generator().manual_seed(rows))
    given = _inputs(rows, 96, rows)
    hessian = (given.T @ given)[None]
    error = {}
    for name, coded in (("calibrated", compensated(weights, hessian, 4, 32)), ("nearest", rounded(weights, 4, 32))):
        error[name] = (given.double() @ (weights - expanded(*coded))[0].double().T).square().sum(dim=0)
    assert bool((error["calibrated"] <= error["nearest"] * (1 + 1e-4)).all())
    assert float(error["calibrated"].sum()) < 0.7 * float(error["nearest"].sum())


def test_inputs_that_tell_nothing_round_to_nearest() -> None:
    """Uncorrelated inputs of the same size leave nothing to make good; no inputs at all count as those."""
    weights = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))
    hessians = torch.stack((torch.eye(32) * 3, torch.zeros(32, 32)))
    for found, expected in zip(compensated(weights, hessians, 4, 32), rounded(weights, 4, 32), strict=True):
        assert torch.equal(found, expected)
