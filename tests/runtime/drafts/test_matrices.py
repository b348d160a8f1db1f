"""Products with quantised matrices: torch's kernels against plain products with the expanded weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from expertcast.runtime.drafts.quantised import (
    CodedMatrices,
    EightBitKernel,
    FourBitKernel,
    Matrices,
    WholeMatrices,
    coded_matrices,
    expanded,
    group_of,
    rounded,
)
from tests.runtime.drafts.by_hand import distance

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
