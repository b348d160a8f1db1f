"""Planes of high and low bytes: every bit comes back, in any order of parts, and what the bytes become."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expertcast.data.models import load_model
from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.storage.codecs import Part, exponent_histogram, make_codec
from expertcast.runtime.storage.codecs.lossless import merge
from expertcast.runtime.storage.layout import BlockLayout
from tests.runtime.storage.codecs.layouts import every_pattern, layout_of, normal_block

WIDE = (256, 256)
"""As many weights as there are patterns."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", ["bitsplit", *(f"bitsplit:shards={count}" for count in range(1, 9)), "raw"])
def test_every_pattern_comes_back(codec: str, dtype: torch.dtype) -> None:
    layout = layout_of(WIDE, (3, 5), (7,), dtype=dtype)  # the last two are padded
    made, block = make_codec(codec, layout), every_pattern(layout)
    assert len(block.view(torch.int16).unique()) == 1 << 16
    found = torch.zeros_like(block)
    made.decode(made.encode(block), found)
    assert torch.equal(found, block)


@settings(max_examples=60, deadline=None)
@given(
    words=st.binary(min_size=1, max_size=512),
    times=st.integers(min_value=1, max_value=700),
    shards=st.integers(min_value=1, max_value=9),
)
def test_any_bytes_come_back(words: bytes, times: int, shards: int) -> None:
    """Runs, repeats and noise, which compress very differently."""
    data = torch.frombuffer(bytearray(words * times + bytes(len(words) * times % 2)), dtype=torch.uint8)
    layout = layout_of((len(data) // 2,))
    block = torch.zeros(layout.block_bytes, dtype=torch.uint8)
    block[: len(data)] = data
    codec = make_codec(f"bitsplit:shards={shards}", layout)
    parts = codec.encode(block)
    assert len(parts) == len(codec.shards) <= shards + 1
    found = torch.full_like(block, 255)
    codec.decode(parts, found)
    assert torch.equal(found, block)


def test_shards_are_expanded_and_recovered_one_by_one() -> None:
    """In any order, each alone: a scheduler has whatever came first decoded."""
    layout = layout_of((3000, 100), (64,))
    codec, block = make_codec("bitsplit:shards=5", layout), normal_block(layout)
    parts = codec.encode(block)
    assert [shard.plane for shard in codec.shards] == [0, 1, 1, 1, 1, 1]
    assert sum(shard.nbytes for shard in codec.shards) == layout.block_bytes
    planes, found = codec.new_planes(block), torch.zeros_like(block)
    codec.expand(0, parts[0], planes)
    order = list(range(1, 6))
    random.Random(1).shuffle(order)
    for step, index in enumerate(order, 1):
        shard = codec.shards[index]
        codec.expand(index, parts[index], planes)
        codec.recover(planes, found, shard)
        done = [codec.shards[other] for other in order[:step]]
        written = [slice(2 * one.start, 2 * (one.start + one.nbytes)) for one in done]
        assert all(torch.equal(found[run], block[run]) for run in written)
        assert torch.count_nonzero(found) <= sum(run.stop - run.start for run in written)
    assert torch.equal(found, block)
    again = torch.zeros_like(block)
    codec.recover(planes, again, codec.shards[0])
    assert torch.equal(again, block)


def test_a_plane_may_lie_where_its_part_was_read() -> None:
    """Nothing is copied then."""
    layout = layout_of((64, 64))
    block = normal_block(layout)
    codec = make_codec("bitsplit", layout)
    parts = codec.encode(block)
    planes = codec.new_planes(block)
    planes[0] = parts[0].data
    for index, part in enumerate(parts):
        codec.expand(index, part, planes)
    found = torch.zeros_like(block)
    codec.recover(planes, found)
    assert torch.equal(found, block)
    raw = make_codec("raw", layout)
    assert raw.new_planes(found)[0].data_ptr() == found.data_ptr()


def test_bytes_of_the_reference_model() -> None:
    """Within 1.5 points of what its exponents allow, of a plane whose sign cannot be compressed."""
    view = find_moe_layers(load_model("reference"))
    layout = BlockLayout.of(view)
    codec = make_codec("bitsplit", layout)
    stored = total = 0
    tensors = []
    for layer in view[::4]:
        parameters = dict(layer.experts.named_parameters())
        for expert in range(0, layer.num_experts, 8):
            block = torch.zeros(layout.block_bytes, dtype=torch.uint8)
            for name, target in layout.views(block).items():
                target[0].copy_(parameters[name][expert])
                tensors.append(parameters[name][expert])
            stored += sum(len(part.data) for part in codec.encode(block))
            total += layout.block_bytes
    bound = exponent_histogram(tensors).bound
    assert bound == pytest.approx(0.670, abs=0.005)
    assert bound - 0.005 < stored / total < bound + 0.015


def test_a_large_expert_has_one_shard_per_mebibyte() -> None:
    """An expert of OLMoE-1B-7B, 12.6 MB."""
    layout = layout_of((2048, 2048), (2048, 1024))
    codec = make_codec("bitsplit", layout)
    assert [shard.nbytes for shard in codec.shards[1:]] == [1 << 20] * 6
    parts = codec.encode(normal_block(layout))
    assert sum(len(part.data) for part in parts) / layout.block_bytes == pytest.approx(0.670, abs=0.005)


def test_what_it_refuses() -> None:
    with pytest.raises(ExpertcastError, match=r"'w0' is float32, not bf16 or fp16; choose codec 'raw'"):
        make_codec("bitsplit", layout_of((4, 4), dtype=torch.float32))
    with pytest.raises(ExpertcastError, match="shards=65: give a number from 1 to 64, or none"):
        make_codec("bitsplit:shards=65", layout_of((4, 4)))


def test_incompressible_weights_take_hardly_more_than_they_are() -> None:
    layout = layout_of((1024, 1024))
    block = torch.randint(256, (layout.block_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    codec = make_codec("bitsplit", layout)
    parts: tuple[Part, ...] = codec.encode(block)
    assert sum(len(part.data) for part in parts) < 1.001 * layout.block_bytes
    found = torch.zeros_like(block)
    codec.decode(parts, found)
    assert torch.equal(found, block)


# Words from planes: on the host and on other devices the same


@pytest.mark.parametrize("count", [1, 128, (1 << 16), (1 << 18) - 1, (1 << 18) + 128])
def test_merge_undoes_a_split(count: int) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).repeat(-(-count // (1 << 16)))[:count]
    low, high = (plane.contiguous() for plane in every.view(torch.uint8).view(-1, 2).unbind(1))
    words = torch.zeros_like(every)
    merge(low, high, words)
    assert torch.equal(words, every)


# Exponents are counted, and what they say is bounded, as by hand


def test_counts() -> None:
    """1 to 1.99 have 127, 2 has 128, 0 and denormals 0, infinities and NaN 255."""
    weights = torch.tensor([1.0, -1.0, 1.9, 2.0, 0.0, -0.0, 1e-40, math.inf, math.nan], dtype=torch.bfloat16)
    histogram = exponent_histogram([weights[:4], weights[4:].view(1, -1)])
    expected = torch.zeros(256, dtype=torch.int64)
    expected[[127, 128, 0, 255]] = torch.tensor([3, 1, 3, 2])
    assert torch.equal(histogram.counts, expected)
    by_hand = -sum(n / 9 * math.log2(n / 9) for n in (3, 1, 3, 2))
    assert histogram.entropy == pytest.approx(by_hand)
    assert histogram.bound == pytest.approx((8 + by_hand) / 16)


def test_fp16_has_five_bits() -> None:
    histogram = exponent_histogram([torch.tensor([1.0, -1.5, 2.0, 0.5], dtype=torch.float16)])
    assert histogram.counts.nonzero().flatten().tolist() == [14, 15, 16]
    assert histogram.entropy == pytest.approx(1.5)
    assert histogram.bound == pytest.approx((11 + 1.5) / 16)


def test_even_exponents_save_nothing() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert exponent_histogram([every]).bound == 1.0
    assert exponent_histogram([every[:128]]).bound == 0.5


def test_normal_weights() -> None:
    """Row E1 gives 2.55 to 2.65 bits for trained models; a normal distribution has 2.55, whatever its spread."""
    layout = layout_of((1024, 1024))
    weights = layout.views(normal_block(layout))["w0"]
    assert exponent_histogram([weights]).entropy == pytest.approx(2.55, abs=0.02)
    assert exponent_histogram([weights * 0.0137]).entropy == pytest.approx(2.55, abs=0.02)


def test_refused() -> None:
    with pytest.raises(ExpertcastError, match="float32: give tensors of one type, bf16 or fp16"):
        exponent_histogram([torch.zeros(3)])
    with pytest.raises(ExpertcastError, match="float16: give tensors of one type"):
        exponent_histogram([torch.zeros(3).bfloat16(), torch.zeros(3).half()])
    with pytest.raises(ExpertcastError, match="no tensors"):
        exponent_histogram([])
