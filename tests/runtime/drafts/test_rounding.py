"""Rounding to a few bits, against the same by hand."""

from __future__ import annotations

import pytest
import torch

from expertcast.runtime.drafts.quantised import expanded, group_of, rounded
from tests.runtime.drafts.by_hand import rounded_group, rounded_weights


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


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_sizes(size: float) -> None:
    """By hand in double precision: codes do not depend on the size of the weights."""
    row = [weight * size for weight in (0.7, -0.9, 0.05, 0.33)]
    codes, scales = rounded(torch.tensor([row], dtype=torch.float32), bits=4, group=4)
    assert expanded(codes, scales)[0].tolist() == pytest.approx(rounded_group(row, 4), rel=1e-5)


def test_groups() -> None:
    assert [group_of(inputs, 4) for inputs in (2048, 384, 192, 96, 24)] == [128, 128, 64, 32, None]
    assert [group_of(inputs, 8) for inputs in (2048, 24)] == [2048, 24]


@pytest.mark.parametrize(("bits", "most"), [(4, 0.106), (8, 0.0066)])
def test_error_on_normal_weights(bits: int, most: float) -> None:
    """A step is a group's extreme over 8 (or 128), and an error in it is uniform: a variance of step^2 / 12. What lies
    beyond 7.5 (or 127.5) steps on the side of the fewer codes adds a little. An extreme of 128 normal weights is 2.8:
    2.8 / 8 / sqrt(12) = 0.101."""
    weights = torch.randn(512, 128, generator=torch.Generator().manual_seed(1))
    least = float(weights.abs().amax(dim=1).square().mean().sqrt()) / 2 ** (bits - 1) / 12**0.5
    found = float((expanded(*rounded(weights, bits, 128)) - weights).norm() / weights.norm())
    assert least * 0.99 < found < most
