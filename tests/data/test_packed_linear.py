"""A linear layer with packed weights, beside the one with its expanded weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from expertcast.data import packed_linear
from expertcast.data.packed_experts import Coded, Coding, PackedForm, rounded
from expertcast.data.packed_linear import PackedLinear
from expertcast.data.tracing import traced


def _layer(bits: int, outputs: int = 112, dtype: torch.dtype = torch.bfloat16) -> tuple[PackedLinear, Tensor]:
    """A layer in codes of so many bits, and its weights."""
    weights = torch.randn(outputs, 64, generator=torch.Generator().manual_seed(bits))
    coded = rounded(weights, bits, 32)
    layer = PackedLinear(PackedForm(Coding(bits, 32, bits == 4), outputs, 64), _bias(outputs, dtype), dtype)
    layer.fill(lambda part: coded[part])
    return layer, coded.expanded()


def _bias(outputs: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, outputs).to(dtype), requires_grad=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", [4, 8])
def test_outputs(bits: int, dtype: torch.dtype) -> None:
    """Near those of `nn.Linear`, in the dtype of the inputs, for any number of dimensions and rows."""
    layer, weights = _layer(bits, dtype=dtype)
    assert torch.equal(layer.weight, weights.bfloat16().to(dtype))
    assert (layer.in_features, layer.out_features) == (64, 112)
    for shape in ((64,), (1, 64), (2, 3, 64), (0, 64)):
        hidden = torch.randn(shape).to(dtype)
        assert layer.bias is not None
        expected = nn.functional.linear(hidden.float(), weights, layer.bias.float())
        found = layer(hidden)
        assert found.dtype == dtype
        assert found.shape == expected.shape
        assert torch.allclose(found.float(), expected, atol=0.1, rtol=0.02)


def test_packed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs that are packed one part after the other have the codes of all at once."""
    expected, _ = _layer(4, outputs=208)
    monkeypatch.setattr(packed_linear, "_AT_ONCE", 64 * 64)
    parts: list[slice] = []
    coded = rounded(torch.randn(208, 64, generator=torch.Generator().manual_seed(4)), 4, 32)

    def read(part: slice) -> Coded:
        parts.append(part)
        return coded[part]

    layer = copy.deepcopy(expected)
    layer.fill(read)  # type: ignore[arg-type]
    assert parts == [slice(0, 64), slice(64, 128), slice(128, 192), slice(192, 208)]
    for own, other in zip(layer.parameters(), expected.parameters(), strict=True):
        assert torch.equal(own, other)


def test_many_rows() -> None:
    layer, weights = _layer(4)
    hidden = torch.randn(800, 64).bfloat16()
    assert layer.bias is not None
    expected = nn.functional.linear(hidden.float(), weights, layer.bias.float())
    assert torch.allclose(layer(hidden).float(), expected, atol=0.1, rtol=0.02)


def test_conversions_leave_the_scales() -> None:
    layer, _ = _layer(4)
    hidden = torch.randn(3, 64).bfloat16()
    expected = layer(hidden)
    layer.half().float().bfloat16()
    assert torch.equal(layer(hidden), expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_in_a_traced_program(bits: int) -> None:
    """The program has the layer's bits, as early attention needs."""
    layer, _ = _layer(bits)
    program = traced(lambda hidden: (layer(hidden),), (torch.randn(1, 1, 64).bfloat16(),), [layer], lengths=[7])
    assert program is not None
    hidden = torch.randn(1, 1, 64).bfloat16()
    assert torch.equal(program(hidden)[0], layer(hidden))
