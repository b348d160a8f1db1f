"""A linear layer with packed weights, beside the one with its expanded weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from expertcast.data import ggml
from expertcast.data.packed_experts import MANY_ROWS, BlockForm, Piece
from expertcast.data.packed_linear import PackedEmbedding, PackedLinear, pack_linears
from expertcast.data.tracing import traced
from tests.families.models import tiny_model


def _layer(kind: str, dtype: torch.dtype = torch.bfloat16) -> tuple[PackedLinear, Tensor]:
    """A layer of a type of blocks, and its weights."""
    blocks = ggml.quantise(kind, torch.randn(112, 64, generator=torch.Generator().manual_seed(0)))
    bias = nn.Parameter(torch.linspace(-1, 1, 112).to(dtype), requires_grad=False)
    layer = PackedLinear(BlockForm((Piece(kind, 112),), 64), bias, dtype)
    layer.form.put(blocks, layer.get_parameter("weight_blocks")[0])
    return layer, ggml.dequantise(kind, blocks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_outputs(kind: str, dtype: torch.dtype) -> None:
    """Near those of `nn.Linear`, in the dtype of the inputs, for any number of dimensions and rows."""
    layer, weights = _layer(kind, dtype)
    assert torch.equal(layer.weight, weights.to(dtype))
    assert (layer.in_features, layer.out_features) == (64, 112)
    held = []
    for shape in ((64,), (1, 64), (2, 3, 64), (0, 64), (MANY_ROWS + 1, 64)):
        hidden = torch.randn(shape).to(dtype)
        assert layer.bias is not None
        expected = nn.functional.linear(hidden.float(), weights, layer.bias.float())
        held.append((layer(hidden), expected))
        assert held[-1][0].dtype == dtype
    for found, expected in held:  # the next product does not overwrite them
        assert found.shape == expected.shape
        assert torch.allclose(found.float(), expected, atol=0.2, rtol=0.02)


def test_an_embedding() -> None:
    """Rows of the expanded weights, for ids of any shape."""
    _, weights = _layer("Q8_0")
    layer = PackedEmbedding(BlockForm((Piece("Q8_0", 112),), 64), torch.bfloat16)
    layer.get_parameter("weight_blocks").data.copy_(_layer("Q8_0")[0].get_parameter("weight_blocks"))
    for ids in (torch.tensor(7), torch.tensor([[3, 111], [0, 3]]), torch.empty(1, 0, dtype=torch.long)):
        assert torch.equal(layer(ids), weights.bfloat16()[ids])


def test_copies_and_conversions_leave_the_blocks() -> None:
    layer, _ = _layer("Q4_0")
    hidden = torch.randn(3, 64).bfloat16()
    expected = layer(hidden)
    other = copy.deepcopy(layer).half().float().bfloat16()
    layer.get_parameter("weight_blocks").data.zero_()
    assert torch.equal(other(hidden), expected)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_in_a_traced_program(kind: str) -> None:
    """The program has the layer's bits, as early attention needs."""
    layer, _ = _layer(kind)
    program = traced(lambda hidden: (layer(hidden),), (torch.randn(1, 1, 64).bfloat16(),), [layer], lengths=[7])
    assert program is not None
    hidden = torch.randn(1, 1, 64).bfloat16()
    assert torch.equal(program(hidden)[0], layer(hidden))


class _Heads(TorchFunctionMode):
    """Heads of queries and keys in each call of torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            self.seen.append((args[0].shape[1], args[1].shape[1]))
        return func(*args, **(kwargs or {}))


def test_attention_of_one_token_groups_its_heads() -> None:
    """Queries of one head of keys are rows of one product; several tokens and plain models run as they did."""
    model = tiny_model("qwen3_moe").bfloat16()
    ids, (name, layer) = (
        torch.tensor([[1, 2, 3, 4]]),
        next(each for each in model.named_modules() if each[0].endswith("o_proj")),
    )
    assert isinstance(layer, nn.Linear)
    attention, form = model.get_submodule(name.rpartition(".")[0]), BlockForm((Piece("Q4_0", 32),), 32)

    def run() -> tuple[list[tuple[int, int]], Tensor]:
        with torch.no_grad(), _Heads() as heads:
            past = model(ids[:, :3], use_cache=True).past_key_values
            return heads.seen, model(ids[:, 3:], past_key_values=past).logits

    plain, expected = run()
    assert all(queries > keys for queries, keys in plain)
    attention.o_proj = PackedLinear(form, None, torch.bfloat16)
    pack_linears(model, {}, {})
    attention.o_proj = layer
    grouped, found = run()
    assert sum(queries == keys for queries, keys in grouped) == 1
    assert torch.allclose(found, expected, atol=0.02)
    (hook,) = attention._forward_pre_hooks.values()
    given = {"hidden_states": torch.zeros(1, 1, 8), "attention_mask": None}
    assert hook(attention, (), given) is not None
    attention.config._attn_implementation = "another"  # which may read a mask as another thing
    assert hook(attention, (), given) is None
