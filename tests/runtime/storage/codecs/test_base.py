"""What holds of every codec: names, texts, damaged parts, and threads beside the interpreter."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.storage.codecs import CODECS, Part, make_codec
from expertcast.runtime.storage.layout import PRECISIONS, BlockLayout
from tests.runtime.storage.codecs.layouts import layout_of, normal_block

LAYOUT = layout_of((128, 256), (128,))


def test_names() -> None:
    assert CODECS.names() == ["raw", "bitsplit", "mxfp4", "fp8", *PRECISIONS]
    assert [name for name in CODECS.names() if not CODECS.get(name).lossless] == list(PRECISIONS)
    with pytest.raises(ExpertcastError, match="unknown codec 'zip': choose from raw, bitsplit, mxfp4, fp8, int8"):
        make_codec("zip", LAYOUT)
    with pytest.raises(ExpertcastError, match="codec 'bitsplit' has no option 'level=3': its options are shards"):
        make_codec("bitsplit:level=3", LAYOUT)


@pytest.mark.parametrize("text", [*CODECS.names(), "bitsplit:shards=3", "fp8:rows=1,columns=0"])
def test_a_text_makes_the_codec_that_has_it(text: str) -> None:
    codec = make_codec(text, LAYOUT)
    assert codec.text == text
    again = make_codec(codec.text, LAYOUT)
    assert (again.planes, again.shards, again.config) == (codec.planes, codec.shards, codec.config)
    for number, plane in enumerate(codec.planes):
        assert sum(shard.nbytes for shard in codec.shards if shard.plane == number) == plane.nbytes


@pytest.mark.parametrize("name", ["raw", "bitsplit", "int8", "int4", "int2"])
def test_a_damaged_part_is_refused(name: str) -> None:
    """Whichever byte of it."""
    codec = make_codec(name, LAYOUT)
    parts = codec.encode(normal_block(LAYOUT))
    for index, part in enumerate(parts):
        for place in range(0, len(part.data), 1 + len(part.data) // 200):
            data = part.data.clone()
            data[place] ^= 1 << place % 8
            with pytest.raises(ExpertcastError, match=rf"part {index} .*{name}.* is damaged: remove the store, and"):
                codec.expand(index, Part(data, part.digest), codec.new_planes(normal_block(LAYOUT)))
            assert Part(data, None).intact(), "compared before"


def test_a_part_of_the_wrong_length_is_refused() -> None:
    """Also where its digest is right: a part of another expert's store, or of another shard."""
    block = normal_block(LAYOUT)
    for name in ("raw", "bitsplit", "int4"):
        codec = make_codec(name, LAYOUT)
        for index, part in enumerate(codec.encode(block)):
            for data in (part.data[:-1], torch.zeros(0, dtype=torch.uint8), torch.cat([part.data, part.data])[1:]):
                with pytest.raises(
                    ExpertcastError, match=rf"part {index} .*(does not decode|instead of).*: remove the store"
                ):
                    codec.expand(index, Part.of(data.clone()), codec.new_planes(block.clone()))
    codec = make_codec("bitsplit:shards=2", layout_of((101, 256)))
    parts = codec.encode(normal_block(codec.layout))
    assert codec.shards[1].nbytes != codec.shards[2].nbytes
    with pytest.raises(ExpertcastError, match="does not decode"):
        codec.decode([parts[0], parts[2], parts[1]], torch.zeros(codec.layout.block_bytes, dtype=torch.uint8))
    with pytest.raises(ExpertcastError, match="2 parts of an expert that has 3"):
        codec.decode(parts[:2], torch.zeros(codec.layout.block_bytes, dtype=torch.uint8))


@pytest.fixture
def _no_forced_switch() -> Iterator[None]:
    """A thread keeps the interpreter's lock until it gives it away."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(before)


def _turns_of_others(work: Callable[[], None]) -> int:
    """How often another thread had its turn while `work` ran."""
    state = ["before"]

    def run() -> None:
        state[0] = "during"
        work()
        state[0] = "after"

    thread = threading.Thread(target=run)
    thread.start()
    turns = 0
    while state[0] != "after":
        turns += state[0] == "during"
        time.sleep(0)  # gives the lock away
    thread.join()
    return turns


def _lets_others(work: Callable[[], None]) -> bool:
    """Whether others had turns in any of some trials: on a machine that is busy they may get none in one."""
    return any(_turns_of_others(work) > 1 for _ in range(20))


@pytest.mark.usefixtures("_no_forced_switch")
def test_decoding_holds_no_lock() -> None:
    """Each step is one call or a few of whole chunks, and others run meanwhile; a loop in Python lets nobody."""
    layout = layout_of((4096, 4096))
    block = normal_block(layout)
    codec = make_codec("bitsplit:shards=1", layout)
    parts, planes = codec.encode(block), codec.new_planes(block)
    assert _lets_others(lambda: parts[0].intact() and None)
    assert _lets_others(lambda: codec.expand(0, parts[0], planes))
    assert _lets_others(lambda: codec.expand(1, parts[1], planes))
    assert _lets_others(lambda: codec.recover(planes, block))
    assert _turns_of_others(lambda: [None for _ in range(10**6)] and None) == 0


def test_threads_share_a_codec() -> None:
    """Each has working memory of its own."""
    layout: BlockLayout = layout_of((512, 512))
    codec = make_codec("bitsplit:shards=3", layout)
    blocks = [normal_block(layout, seed) for seed in range(4)]
    coded = [codec.encode(block) for block in blocks]
    found = [torch.zeros_like(block) for block in blocks]

    def decode(number: int) -> None:
        for _ in range(20):
            codec.decode(coded[number], found[number])

    threads = [threading.Thread(target=decode, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(one, block) for one, block in zip(found, blocks, strict=True))
