"""What holds of every codec, raw and bitsplit: every bit comes back, in any order of parts, or the part is refused."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.storage.codecs import CODECS, Codec, Part, make_codec, merge
from tests.runtime.storage.codecs.layouts import cut_into, every_pattern, layout_of, normal_block

LAYOUT = layout_of((128, 256), (128,))
CODEC = pytest.mark.parametrize(("name", "shards"), [("raw", 1), ("bitsplit", 1), ("bitsplit", 3)])


def decoded(codec: Codec, parts: tuple[Part, ...] | list[Part]) -> Tensor:
    found = torch.full((codec.layout.block_bytes,), 255, dtype=torch.uint8)
    codec.decode(parts, found)
    return found


def test_names() -> None:
    assert CODECS.names() == ["raw", "bitsplit"]
    planes = {name: [plane.name for plane in make_codec(name, LAYOUT).planes] for name in CODECS.names()}
    assert planes == {"raw": ["block"], "bitsplit": ["low", "high"]}
    with pytest.raises(ExpertcastError, match="unknown codec 'zip': choose from raw, bitsplit"):
        make_codec("zip", LAYOUT)


@CODEC
def test_shards_cover_planes(name: str, shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_into(shards, monkeypatch)
    codec = make_codec(name, LAYOUT)
    for number, plane in enumerate(codec.planes):
        assert sum(shard.nbytes for shard in codec.shards if shard.plane == number) == plane.nbytes


@CODEC
def test_a_damaged_part_is_refused(name: str, shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever byte of it, and a part of the wrong length also where its digest is right: one of another store."""
    cut_into(shards, monkeypatch)
    codec, block = make_codec(name, LAYOUT), normal_block(LAYOUT)
    for index, part in enumerate(codec.encode(block)):
        planes = codec.new_planes(block.clone())
        for place in range(0, len(part.data), 1 + len(part.data) // 100):
            data = part.data.clone()
            data[place] ^= 1 << place % 8
            with pytest.raises(ExpertcastError, match=rf"part {index} .*{name}.* is damaged: remove the store and"):
                codec.expand(index, Part(data, part.digest), planes)
            assert Part(data, None).intact(), "compared before"
        for data in (part.data[:-1], torch.zeros(0, dtype=torch.uint8), torch.cat([part.data, part.data])[1:]):
            refused = rf"part {index} .*(does not decode|instead of).*: remove the store"
            with pytest.raises(ExpertcastError, match=refused):
                codec.expand(index, Part.of(data.clone()), planes)


def test_parts_of_other_shards_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_into(2, monkeypatch)
    codec = make_codec("bitsplit", layout_of((101, 256)))
    parts = codec.encode(normal_block(codec.layout))
    assert codec.shards[1].nbytes != codec.shards[2].nbytes
    with pytest.raises(ExpertcastError, match="does not decode"):
        decoded(codec, [parts[0], parts[2], parts[1]])
    with pytest.raises(ExpertcastError, match="2 parts of an expert that has 3"):
        decoded(codec, parts[:2])


# Threads beside the interpreter


def test_threads_share_a_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has working memory of its own."""
    cut_into(3, monkeypatch)
    layout = layout_of((512, 512))
    codec = make_codec("bitsplit", layout)
    blocks = [normal_block(layout, seed) for seed in range(4)]
    coded = [codec.encode(block) for block in blocks]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda number: decoded(codec, coded[number % 4]), range(40)))
    assert all(torch.equal(one, blocks[number % 4]) for number, one in enumerate(found))


# Raw and bitsplit: every bit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("codec", "shards"), [("raw", 1), *(("bitsplit", count) for count in range(1, 9))])
def test_every_pattern_comes_back(codec: str, shards: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """256 x 256 weights are as many as there are patterns."""
    cut_into(shards, monkeypatch)
    layout = layout_of((256, 256), (3, 5), (7,), dtype=dtype)  # the last two are padded
    made, block = make_codec(codec, layout), every_pattern(layout)
    assert len(block.view(torch.int16).unique()) == 1 << 16
    assert torch.equal(decoded(made, made.encode(block)), block)


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
    with pytest.MonkeyPatch.context() as monkeypatch:
        cut_into(shards, monkeypatch)
        codec = make_codec("bitsplit", layout)
    parts = codec.encode(block)
    assert len(parts) == len(codec.shards) <= shards + 1
    assert torch.equal(decoded(codec, parts), block)


def test_shards_are_expanded_and_recovered_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order, each alone: a scheduler has whatever came first decoded."""
    cut_into(5, monkeypatch)
    layout = layout_of((3000, 100), (64,))
    codec, block = make_codec("bitsplit", layout), normal_block(layout)
    parts = codec.encode(block)
    assert [shard.plane for shard in codec.shards] == [0, 1, 1, 1, 1, 1]
    planes, found = codec.new_planes(block), torch.zeros_like(block)
    planes[0] = parts[0].data  # a plane may lie where its part was read: nothing is copied then
    codec.expand(0, parts[0], planes)
    order = list(range(1, 6))
    random.Random(1).shuffle(order)
    for step, index in enumerate(order, 1):
        codec.expand(index, parts[index], planes)
        codec.recover(planes, found, codec.shards[index])
        done = [codec.shards[other] for other in order[:step]]
        written = [slice(2 * one.start, 2 * (one.start + one.nbytes)) for one in done]
        assert all(torch.equal(found[run], block[run]) for run in written)
        assert torch.count_nonzero(found) <= sum(run.stop - run.start for run in written)
    for shard in (None, codec.shards[0]):
        again = torch.zeros_like(block)
        codec.recover(planes, again, shard)
        assert torch.equal(again, block)
    raw = make_codec("raw", layout)
    assert raw.new_planes(found)[0].data_ptr() == found.data_ptr()


@pytest.mark.parametrize("count", [1, 128, (1 << 16), (1 << 18) - 1, (1 << 18) + 128])
def test_merge_undoes_a_split(count: int) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).repeat(-(-count // (1 << 16)))[:count]
    low, high = (plane.contiguous() for plane in every.view(torch.uint8).view(-1, 2).unbind(1))
    words = torch.zeros_like(every)
    merge(low, high, words)
    assert torch.equal(words, every)


def test_a_large_expert_has_one_shard_per_mebibyte() -> None:
    """An expert of OLMoE-1B-7B, 12.6 MB."""
    layout = layout_of((2048, 2048), (2048, 1024))
    codec = make_codec("bitsplit", layout)
    assert [shard.nbytes for shard in codec.shards[1:]] == [1 << 20] * 6
    parts = codec.encode(normal_block(layout))
    assert sum(len(part.data) for part in parts) / layout.block_bytes == pytest.approx(0.670, abs=0.005)


def test_incompressible_weights_take_hardly_more_than_they_are() -> None:
    layout = layout_of((1024, 1024))
    block = torch.randint(256, (layout.block_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    codec = make_codec("bitsplit", layout)
    parts = codec.encode(block)
    assert sum(len(part.data) for part in parts) < 1.001 * layout.block_bytes
    assert torch.equal(decoded(codec, parts), block)


def test_what_bitsplit_refuses() -> None:
    with pytest.raises(ExpertcastError, match=r"'w0' is float32, not bf16 or fp16; choose codec 'raw'"):
        make_codec("bitsplit", layout_of((4, 4), dtype=torch.float32))
