"""Matrices as codes and scales: as the kernel reads them, and as checkpoints ship them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from expertcast.data import packed_experts
from expertcast.data.packed_experts import CODES, MIDDLE, SCALES, Coded, Coding, PackedForm, rounded
from expertcast.data.weights.blocks import CODINGS, coded_blocks, coded_mxfp4
from expertcast.predictors import ExpertcastError
from tests.data import cuda_kernel

_EXPERTS = 3


def _packed(coded: Coded, form: PackedForm) -> tuple[Tensor, Tensor]:
    """Codes and scales of all experts."""
    parts = {end: torch.empty(len(coded.codes), *shape, dtype=dtype) for end, (shape, dtype) in form.parts().items()}
    form.encode(coded, parts[CODES], parts[SCALES])
    return parts[CODES], parts[SCALES]


def _form(coded: Coded, bits: int, group: int, symmetric: bool) -> PackedForm:
    return PackedForm(Coding(bits, group, symmetric), *coded.shape[-2:])


def _random(bits: int, outputs: int, inputs: int = 64, group: int = 32, symmetric: bool = False) -> Coded:
    draw = torch.Generator().manual_seed(outputs)
    codes = torch.randint(1 << bits, (_EXPERTS, outputs, inputs), dtype=torch.uint8, generator=draw)
    scales, zeros = torch.randn(2, _EXPERTS, outputs, inputs // group, generator=draw)
    return Coded(bits, codes, scales, None if symmetric else zeros)


@pytest.mark.parametrize("outputs", [16, 32, 48, 64, 96, 208])
@pytest.mark.parametrize("bits", [4, 8])
def test_order_is_that_of_torch(bits: int, outputs: int) -> None:
    """Of all experts in one call; 8 bits are the high halves, then the low ones."""
    coded = _random(bits, outputs)
    codes, _ = _packed(coded, _form(coded, bits, 32, False))
    halves = [coded.codes] if bits == 4 else [coded.codes >> 4, coded.codes & 15]
    for place, half in enumerate(halves):
        for expert in range(_EXPERTS):
            own = codes[expert] if bits == 4 else codes[expert, place]
            expected = torch._convert_weight_to_int4pack_for_cpu(half[expert].int(), 1)
            assert torch.equal(own.flatten(), expected.flatten())


@pytest.fixture(params=["bf16", "fp32"])
def wide(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of many rows as on a processor with and without bf16 in oneDNN, in several parts."""
    monkeypatch.setattr(packed_experts, "WIDE", {"bf16": torch.bfloat16, "fp32": torch.float32}[request.param])
    monkeypatch.setattr(packed_experts, "MANY_ROWS", {4: 20, 8: 20})
    monkeypatch.setattr(packed_experts, "_PART", 70 * 64)
    monkeypatch.setattr(packed_experts, "_PIECE", 40 * 64)


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("rows", [1, 7, 30])
@pytest.mark.parametrize("outputs", [96, 208])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_products(bits: int, symmetric: bool, outputs: int, rows: int) -> None:
    """The kernel's, near those of the expanded weights."""
    coded = _random(bits, outputs, symmetric=symmetric)
    form = _form(coded, bits, 32, symmetric)
    codes, scales = _packed(coded, form)
    rows_PI = torch.randn(rows, 64).bfloat16()
    for expert in range(_EXPERTS):
        expected = rows_PI.float() @ form.expand(codes[expert], scales[expert]).float().T
        found = form.multiply(rows_PI, codes[expert], scales[expert]).float()
        assert (found - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.fixture(params=["stand-in", pytest.param("cuda", marks=pytest.mark.gpu)])
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device on which forms for CUDA compute."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        return "cuda"
    cuda_kernel.stand_in(monkeypatch)
    return "cpu"


@pytest.mark.parametrize(("outputs", "inputs", "group"), [(48, 32, 32), (32, 192, 64), (16, 256, 256)])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_products_for_cuda(bits: int, symmetric: bool, outputs: int, inputs: int, group: int, cuda: str) -> None:
    """Packed on the host, multiplied on the device: any number of rows, and the weights that the CPU's form has."""
    coded = _random(bits, outputs, inputs, group, symmetric)
    form = replace(_form(coded, bits, group, symmetric), device="cuda")
    codes, scales = _packed(coded, form)
    for expert, weights_NI in enumerate(coded.expanded()):
        expanded = form.expand(codes[expert], scales[expert])
        assert expanded.device.type == "cpu"
        assert (expanded.float() - weights_NI).abs().max() <= 0.02 * weights_NI.abs().max()
        for rows in (1, 500):
            rows_PI = torch.randn(rows, inputs).bfloat16()
            found = form.multiply(rows_PI.to(cuda), codes[expert].to(cuda), scales[expert].to(cuda)).cpu().float()
            expected = rows_PI.float() @ expanded.float().T
            assert (found - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_many_rows_in_float32_are_rounded_once(bits: int, symmetric: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are not rounded to bf16: only the results are."""
    monkeypatch.setattr(packed_experts, "WIDE", torch.float32)
    coded = rounded(torch.randn(1, 96, 512, generator=torch.Generator().manual_seed(0)), bits, 32)
    form = _form(coded, bits, 32, symmetric and bits == 4)
    codes, scales = _packed(coded, form)
    rows_PI = torch.randn(packed_experts.MANY_ROWS[bits], 512).bfloat16()
    expected = rows_PI.double() @ coded.expanded()[0].double().T
    found = form.multiply(rows_PI, codes[0], scales[0])
    assert ((found.double() - expected).abs() <= expected.abs() * 2**-7.99 + 1e-4).all()


def test_memory_of_inference_mode_serves_other_calls() -> None:
    """Calls under `inference_mode` and `no_grad` share it."""
    coded = _random(4, 48, symmetric=True)
    form = _form(coded, 4, 32, True)
    codes, scales = _packed(coded, form)

    def products() -> list[Tensor]:
        torch.manual_seed(0)
        return [form.multiply(torch.randn(rows, 64), codes[0], scales[0]) for rows in (1, 400)]

    def run() -> list[Tensor]:
        with torch.inference_mode():
            products()
        with torch.no_grad():
            return products()

    with ThreadPoolExecutor(1) as thread:  # which has no memory yet
        assert all(map(torch.equal, thread.submit(run).result(), products()))


def _within_bf16(form: PackedForm, coded: Coded) -> None:
    """What is packed stands for the weights but for scales and zeros, and in the end weights, that are bf16."""
    codes, scales = _packed(coded, form)
    steps = (coded.codes.int() - MIDDLE[coded.bits]).abs().unflatten(-1, (coded.scales.shape[-1], -1))
    zeros = torch.zeros_like(coded.scales) if coded.zeros is None else coded.zeros
    most = (steps * coded.scales.abs().unsqueeze(-1) + zeros.abs().unsqueeze(-1)).flatten(-2)
    for expert, expected in enumerate(coded.expanded()):
        found = form.expand(codes[expert], scales[expert]).float()
        assert ((found - expected).abs() <= most[expert] * 2**-6.9 + 1e-37).all()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 256])
@pytest.mark.parametrize("bits", [4, 8])
def test_rounding(bits: int, group: int, symmetric: bool) -> None:
    """No further than half a step from the weights, and packed without a further error; a row of zeros stays so."""
    weights = torch.randn(_EXPERTS, 32, 512, generator=torch.Generator().manual_seed(0)) + (not symmetric)
    weights[0, 3] = 0
    coded = rounded(weights.bfloat16(), bits, group)
    assert coded.codes.max() == (1 << bits) - 1
    error = (coded.expanded() - weights.bfloat16().float()).unflatten(-1, (-1, group)).abs().amax(-1)
    # what the range has too little of after its ends are bf16, or of 4 bits at the side that has 7 codes
    assert (error <= coded.scales.abs() * (1.01 if bits == 4 else 1.5)).all()
    assert error.mean() < 0.6 * coded.scales.abs().mean()
    assert not coded.expanded()[0, 3].any()
    form = _form(coded, bits, group, bits == 4)
    codes, scales = _packed(coded, form)
    for expert in range(_EXPERTS):
        assert torch.equal(form.expand(codes[expert], scales[expert]), coded.expanded()[expert].bfloat16())


@pytest.mark.parametrize(("outputs", "inputs", "group"), [(24, 64, 32), (32, 48, 32), (32, 64, 16), (32, 64, 512)])
def test_what_the_kernel_does_not_take(outputs: int, inputs: int, group: int) -> None:
    with pytest.raises(ExpertcastError, match=r"cannot be packed in 4 bits .* give experts='expanded'"):
        PackedForm(Coding(4, group, True), outputs, inputs)


@pytest.mark.parametrize(
    ("own", "wider"),
    [
        (Coding(4, 128, True), Coding(4, 32, True)),
        (Coding(4, 128, True), Coding(4, 128, False)),
        (Coding(4, 64, True), Coding(8, 32, True)),
        (Coding(4, 64, False), Coding(8, 32, False)),
        (Coding(8, 256, True), Coding(8, 64, False)),
    ],
)
def test_a_wider_coding_holds_the_same_weights(own: Coding, wider: Coding) -> None:
    coded = _random(own.bits, 16, 256, own.group, own.symmetric)
    fitted = coded.fitted(wider)
    assert Coding.over([wider, own]) == wider
    assert (fitted.bits, fitted.scales.shape[-1], fitted.zeros is None) == (wider.bits, 256 // wider.group, wider[2])
    assert torch.equal(fitted.expanded(), coded.expanded())


# Blocks of GGUF and MXFP4

_MINIMA = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
"""Kinds with a second float."""


def _all_scales(kind: str, size: int) -> np.ndarray:
    """Random blocks uint8 [48, B, size] with every finite fp16 number (every exponent) as scale: zeros, subnormals,
    negative ones."""
    draw = np.random.default_rng(0)
    if kind == "MXFP4":
        scales = np.arange(252, dtype=np.uint8)[:, None]  # larger ones overflow
    else:
        patterns = np.arange(1 << 16, dtype=np.uint16)
        patterns = patterns[np.isfinite(patterns.view(np.float16))][: -(-63488 // 48) * 48]
        scales = patterns[:: 8 if size > 34 else 1].copy().view(np.uint8).reshape(-1, 2)
    count = len(scales) // 48 * 48 or len(scales)
    blocks = draw.integers(256, size=(count, size), dtype=np.uint8)
    blocks[:, : scales.shape[1]] = scales[:count]
    if kind in _MINIMA:
        blocks[:, 2:4] = draw.permutation(scales[:count])
    return blocks.reshape(-1, 16, count // 16 // (3 if count % 48 == 0 else 1) * size)


@pytest.mark.parametrize("kind", CODINGS)
def test_blocks_are_those_of_gguf(kind: str) -> None:
    """Exactly where the arithmetic is the same; with a minimum but for float32's rounding. Packed but for bf16's."""
    gguf: Any = pytest.importorskip("gguf")
    stored = gguf.GGMLQuantizationType[kind]
    octets = _all_scales(kind, gguf.GGML_QUANT_SIZES[stored][1])
    expected = torch.from_numpy(gguf.dequantize(octets, stored))
    coded = coded_blocks(kind, torch.from_numpy(octets))
    assert (coded.bits, 32, coded.zeros is None) == CODINGS[kind]
    found = coded.expanded()
    if coded.zeros is None or kind == "Q8_0":
        assert torch.equal(found, expected)
    else:
        most = (16 * coded.scales.abs() + coded.zeros.abs()).repeat_interleave(32, -1)
        assert ((found - expected).abs() <= most * 2**-22).all()
    _within_bf16(_form(coded, *CODINGS[kind]), coded)
    _within_bf16(_form(coded, 8, 32, False), coded)


def test_mxfp4_of_safetensors() -> None:
    """Exactly transformers' weights."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    draw = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (_EXPERTS, 32, 4, 16), dtype=torch.uint8, generator=draw)
    scales = torch.randint(100, 140, (_EXPERTS, 32, 4), dtype=torch.uint8, generator=draw)
    coded = coded_mxfp4(blocks, scales)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).mT
    assert torch.equal(coded.expanded().bfloat16(), expected)
    form = _form(coded, *CODINGS["MXFP4"])
    codes, packed = _packed(coded, form)
    assert all(torch.equal(form.expand(codes[expert], packed[expert]), expected[expert]) for expert in range(_EXPERTS))
