"""Layers that grow in place hold and return what a `DynamicCache` does, whatever is done to them or to copies."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from expertcast import offload
from expertcast.data.kv_cache import GrowingLayer, grow_in_place
from tests.families.models import tiny_model
from tests.runtime.conftest import greedy
from tests.runtime.faults import INPUTS


def _new(length: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, length, 4), torch.randn(batch, 3, length, 5)


CHANGES: dict[str, Callable[[DynamicCache], object]] = {
    "cropped": lambda cache: cache.crop(-2),
    "emptied": lambda cache: cache.reset(),
    "reordered": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "chosen": lambda cache: cache.batch_select_indices(torch.tensor([0, 0])),
    "none": lambda cache: None,
}


@pytest.mark.parametrize("change", CHANGES)
def test_same_as_a_dynamic_cache(change: str) -> None:
    plain, grown = DynamicCache(), DynamicCache()
    grow_in_place(torch.nn.Identity(), (), {"past_key_values": grown})
    seen = list[tuple[Tensor, Tensor]]()
    for length in (5, 1, 1, 70, 1, 0, 1):
        for part in range(2):
            new = _new(length)
            for each in (plain, grown):
                seen.append(each.update(*new, part))
            seen[-2:] = [(seen[-2][0].clone(), seen[-1][0]), (seen[-2][1].clone(), seen[-1][1])]
            for expected, got in seen:
                assert torch.equal(expected, got), "what was returned before has changed"
        if length == 70:
            CHANGES[change](plain)
            CHANGES[change](grown)
        assert plain.get_seq_length() == grown.get_seq_length()
    assert all(type(layer) is GrowingLayer for layer in grown.layers)


def test_a_token_takes_the_place_behind_the_others() -> None:
    layer = GrowingLayer()
    layer.update(*_new(500))
    places = {layer.update(*_new(1))[0].data_ptr() for _ in range(64)}
    assert len(places) == 1
    layer.update(*_new(1))
    assert layer.keys.data_ptr() not in places
    assert layer.keys.shape[-2] == 565


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_do_not_write_over_each_other(copied: Callable[[GrowingLayer], GrowingLayer]) -> None:
    layer = GrowingLayer()
    layer.update(*_new(9))
    other, more = copied(layer), [_new(1), _new(1)]
    held = layer.keys.clone()
    for each, new in zip((other, layer), more, strict=True):
        each.update(*new)
    for each, (keys, values) in zip((other, layer), more, strict=True):
        assert torch.equal(each.keys, torch.cat([held, keys], dim=-2))
        assert torch.equal(each.values[:, :, -1:], values)


def test_memory_of_inference_mode_and_gradients() -> None:
    layer = GrowingLayer()
    with torch.inference_mode():
        layer.update(*_new(3))
    layer.update(*_new(1))
    keys, values = _new(1)
    layer.update(keys.requires_grad_(), values)
    layer.keys.sum().backward()
    assert torch.equal(keys.grad, torch.ones_like(keys))  # type: ignore[arg-type]


def test_caches_of_an_offload_grow_in_place() -> None:
    model, cache = tiny_model("qwen3_moe"), DynamicCache()
    expected = greedy(model, INPUTS, 12)
    with offload(model, slots=8):
        sequence = model.generate(
            **INPUTS, past_key_values=cache, max_new_tokens=12, min_new_tokens=12, do_sample=False
        )
        assert {type(layer) for layer in cache.layers} == {GrowingLayer}
    assert torch.equal(sequence, expected[0])
    assert not any(type(layer) is DynamicLayer for layer in cache.layers)
