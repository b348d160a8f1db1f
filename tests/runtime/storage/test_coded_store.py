"""The coded store: the same bits from fewer bytes, and never a stale or damaged file without a word."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast import OffloadConfig, offload
from expertcast.data.machine import usable_processors
from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors import ExpertcastError, MoEView
from expertcast.predictors.messages import format_bytes
from expertcast.runtime.links.disk import DiskLink
from expertcast.runtime.links.emulated import EmulatedLink
from expertcast.runtime.storage.codecs import BitSplit, Raw
from expertcast.runtime.storage.coded_reader import (
    EVERYTHING,
    KINDS,
    CodedReader,
    DecodePlan,
    PartBuffers,
    PartMemory,
    decoders_of,
    decoding_bytes,
)
from expertcast.runtime.storage.disk_store import DiskStore
from expertcast.runtime.storage.expert_file import FILE_NAME, ExpertFile, verify_store
from expertcast.runtime.storage.layout import sectors
from expertcast.runtime.storage.memory import HostMemory
from expertcast.runtime.storage.reader import DirectReader
from expertcast.runtime.storage.store import ExpertStore
from tests.families.models import tiny_model
from tests.runtime.conftest import assert_same, greedy
from tests.runtime.faults import INPUTS, RaiseAt
from tests.runtime.storage.codecs.layouts import cut_into


def _model(seed: int = 0) -> PreTrainedModel:
    return tiny_model("qwen3_moe", seed=seed).to(torch.bfloat16)


def _store(folder: Path | None, seed: int = 0, codec: str = "bitsplit") -> tuple[DiskStore, MoEView]:
    view = find_moe_layers(_model(seed))
    return DiskStore(view, folder, codec=codec, fingerprint=str(seed)), view


def _blocks(store: ExpertStore) -> Tensor:
    return torch.stack([store.block(key) for key in range(store.layers * store.experts)])


@pytest.fixture(scope="module")
def expected() -> Tensor:
    view = find_moe_layers(_model())
    store = ExpertStore(view)
    store.pack(view)
    return _blocks(store).clone()


def test_an_experts_shards_are_read_before_its_plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the file the plane comes first."""
    cut_into(3, monkeypatch)
    store, view = _store(tmp_path)
    store.pack(view)
    asked: list[int] = []
    submit = DirectReader.submit
    monkeypatch.setattr(DirectReader, "submit", lambda self, read: (asked.append(read.offset), submit(self, read))[1])
    reader = store.reader(1, None)
    read = store.read(3, torch.empty(store.layout.block_bytes, dtype=torch.uint8), urgent=True)
    reader.submit(read)
    reader.wait(read)
    reader.close()
    plane, *shards = sorted(asked)
    assert asked == [*shards, plane]
    store.close()


def test_the_codec_that_lies_there(tmp_path: Path) -> None:
    """It is taken where none is given; where nothing lies there, what will be written is named."""
    model = _model()
    with offload(model, store="disk", codec="bitsplit", store_folder=tmp_path / "coded", slots=5):
        pass
    with offload(model, store="disk", store_folder=tmp_path / "coded", slots=5, pools="C=20KB") as offloaded:
        assert isinstance(offloaded.store, DiskStore)
        assert offloaded.store.codec.name == "bitsplit"
        size = format_bytes(offloaded.store.nbytes)
    with pytest.warns(UserWarning, match=f"codec 'raw' writes {size} of experts"):
        offload(model, store="disk", store_folder=tmp_path / "raw", slots=5).close()
    assert [len(list((tmp_path / name).iterdir())) for name in ("coded", "raw")] == [1, 1]
    (tmp_path / "coded" / FILE_NAME).write_bytes((tmp_path / "coded" / FILE_NAME).read_bytes()[:-100])
    with pytest.raises(ExpertcastError, match=r"is damaged: .* bytes instead of .*; remove it"):
        offload(model, store="disk", store_folder=tmp_path / "coded", slots=5)


def test_other_weights_or_codec_make_it_again(expected: Tensor, tmp_path: Path) -> None:
    store, view = _store(tmp_path)
    store.pack(view)
    for seed, codec, why in ((1, "bitsplit", "other weights"), (0, "raw", "made by codec 'bitsplit'")):
        with pytest.warns(
            UserWarning, match=f"{store.path}' is rebuilt: it was written .*{why}" if seed else "is rebuilt: it was"
        ):
            again, view = _store(tmp_path, seed=seed, codec=codec)
        assert not again.holds(0)
        again.pack(view)
    assert torch.equal(_blocks(again), expected)


def test_a_damaged_part_is_one_error(tmp_path: Path) -> None:
    """It is found when it is read, by its digest; experts that are whole are read on."""
    model = _model()
    with offload(model, store="disk", codec="bitsplit", store_folder=tmp_path, slots=5) as offloaded:
        store = offloaded.store
        assert isinstance(store, DiskStore)
        before = greedy(offloaded, INPUTS)
        content = bytearray(store.path.read_bytes())
        place = int(ExpertFile(store.path).offsets[0, 1])
        times = store.path.stat()
        for value in (1, 0):
            content[place] = content[place] ^ 1
            with store.path.open("r+b") as file:
                file.write(content)
            os.utime(store.path, ns=(times.st_atime_ns, times.st_mtime_ns))
            if value:
                with pytest.raises(ExpertcastError, match=r"part 1 .* of an expert in the store is damaged"):
                    store.views(0)
                with pytest.raises(ExpertcastError, match="part 1 of expert 0 is damaged; remove it"):
                    verify_store(store.path)
                assert store.views(1)
        assert_same(greedy(offloaded, INPUTS), before)
        verify_store(store.path)


def test_reads_that_give_less_than_was_asked_for(
    expected: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, view = _store(tmp_path)
    store.pack(view)
    pread, preadv = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda file, size, at: pread(file, min(size, 1000), at))
    monkeypatch.setattr(os, "preadv", lambda file, views, at: preadv(file, [memoryview(views[0])[:1000]], at))
    assert torch.equal(_blocks(store), expected)


def test_reads_after_others_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expert 0 cannot be read, and of expert 1 all parts are damaged: expert 2 arrives."""
    store, view = _store(tmp_path)
    store.pack(view)
    _change(store.path, ExpertFile(store.path).offsets[1].tolist())
    reader, block = store.reader(2, None), torch.empty(store.layout.block_bytes, dtype=torch.uint8)

    def fail(key: int, message: str) -> None:
        read = store.read(key, block, urgent=True)
        reader.submit(read)
        with pytest.raises(ExpertcastError, match=message):
            reader.wait(read)

    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, "no disk")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refuse)
        fail(0, "cannot be read: no disk")
    fail(1, "is damaged")
    whole = store.read(2, block, urgent=True)
    reader.submit(whole)
    reader.wait(whole)
    reader.close()
    assert torch.equal(block, store.block(2))


def _change(path: Path, places: list[int]) -> None:
    """Flip a bit of some bytes; the file's time stays."""
    content, times = bytearray(path.read_bytes()), path.stat()
    for place in places:
        content[place] ^= 1
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_a_callback_that_fails(expected: Tensor, tmp_path: Path) -> None:
    """Of the reader, which asks what to keep, and of the read: whoever waits gets what it raised."""
    store, view = _store(tmp_path)
    store.pack(view)
    wanted = RaiseAt(1, ZeroDivisionError())
    reader = CodedReader(store.file, store.codec, threads=2, kept=(2, 2), wanted=lambda _key: wanted() or EVERYTHING)
    block = HostMemory(store.layout.block_bytes).bytes
    raising = RaiseAt(1, KeyboardInterrupt())
    for key, then, error in ((0, None, ZeroDivisionError), (1, raising, KeyboardInterrupt)):
        read = store.read(key, block, urgent=True, then=then)
        reader.submit(read)
        with pytest.raises(error):
            reader.wait(read)
    reader.close()


def test_killed_while_packing(expected: Tensor, tmp_path: Path) -> None:
    """Half a file never has the name, and the next packing removes it."""
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from tests.runtime.storage.test_coded_store import _store\n"
        "store, view = _store(Path(sys.argv[1]))\n"
        "fill = store.fill\n"
        "def kill(layer, write):\n"
        "    fill(layer, write)\n"
        "    if layer == 1:\n"
        "        os.kill(os.getpid(), 9)\n"
        "store.fill = kill\n"
        "store.pack(view)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -9
    (left,) = tmp_path.iterdir()
    assert left.name != FILE_NAME
    store, view = _store(tmp_path)
    store.pack(view)
    assert torch.equal(_blocks(store), expected)
    assert [entry.name for entry in tmp_path.iterdir()] == [FILE_NAME]


def test_refusals() -> None:
    model = _model()
    with pytest.raises(ExpertcastError, match="unknown codec 'int4'"):
        offload(model, store="disk", codec="int4")
    with pytest.raises(ExpertcastError, match="use link 'disk'"):
        offload(model, store="disk", codec="bitsplit", link=EmulatedLink(1e9))
    with offload(model, store="disk", codec="bitsplit", bandwidth=1e9, slots=9) as offloaded:
        assert isinstance(offloaded.link, DiskLink), "not the emulated link, which reads memory"
        assert offloaded.link.bandwidth == 1e9
    with pytest.raises(ExpertcastError, match="'zip'"):
        OffloadConfig(store="disk", codec="zip")
    with pytest.raises(ExpertcastError, match=r"needs store='disk' \(--store-folder\): give that too"):
        OffloadConfig(codec="bitsplit")
    with pytest.raises(ExpertcastError, match="not bf16 or fp16"):
        offload(tiny_model("qwen3_moe").float(), store="disk", codec="bitsplit")


# Forecasts are not decoded beside the model: they wait until somebody waits


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    view = find_moe_layers(tiny_model("qwen3_moe").to(torch.bfloat16))
    made = DiskStore(view, tmp_path, codec="bitsplit", fingerprint="one")
    made.pack(view)
    return made


@pytest.fixture
def reader(store: DiskStore) -> Iterator[CodedReader]:
    threads = torch.get_num_threads()
    torch.set_num_threads(usable_processors())
    made = store.reader(2, None)
    made.defer_forecasts = True
    yield made
    made.close()
    torch.set_num_threads(threads)


def test_a_forecast_is_read_and_waits(store: DiskStore, reader: CodedReader) -> None:
    blocks = torch.zeros(2, store.layout.block_bytes, dtype=torch.uint8)
    early, urgent = (store.read(key, block, urgent=not key) for key, block in zip((1, 0), blocks, strict=True))
    reader.submit(early)
    while early.reads_left:
        time.sleep(1e-3)
    reader.submit(urgent)
    urgent.wait()
    assert torch.equal(blocks[1], store.block(0))
    assert early.jobs_left == len(reader._plan.jobs)
    assert not blocks[0].any()
    reader.wait(early)
    assert torch.equal(blocks[0], store.block(1))


def test_one_that_becomes_urgent(store: DiskStore, reader: CodedReader) -> None:
    block = torch.zeros(store.layout.block_bytes, dtype=torch.uint8)
    read = store.read(2, block, urgent=False)
    reader.submit(read)
    while read.reads_left:
        time.sleep(1e-3)
    assert read.jobs_left
    reader.promote(read)
    read.wait()
    assert torch.equal(block, store.block(2))


def test_threads_are_no_more_than_can_be_busy(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the machine's 64 processors are this process's; with all of them, two jobs of each of four experts."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    for affinity, threads in ((2, 2), (64, 8)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _process, count=affinity: range(count))
        assert decoders_of(DecodePlan(store.codec)) == threads
    assert decoding_bytes(Raw(store.layout)) == 0, "uncoded blocks need no scratch memory"


def test_processors_that_torch_leaves_free(store: DiskStore, reader: CodedReader) -> None:
    torch.set_num_threads(max(1, usable_processors() - 1))
    if usable_processors() == 1:
        pytest.skip("one processor: torch leaves none free")
    block = torch.zeros(store.layout.block_bytes, dtype=torch.uint8)
    read = store.read(3, block, urgent=False)
    reader.submit(read)
    read.wait()
    assert torch.equal(block, store.block(3))


def test_decoding_threads_are_no_teams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch starts no threads of its own for the operators of a decoding thread."""
    monkeypatch.setattr(BitSplit, "recover", lambda _self, _planes, block, _shard: block.add_(1))
    view = find_moe_layers(tiny_model("qwen3_moe", hidden_size=512, moe_intermediate_size=256, num_hidden_layers=1))
    store = DiskStore(view, tmp_path, codec="bitsplit", fingerprint="one")
    store.pack(view)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    reader = store.reader(2, None)
    before = len(os.listdir("/proc/self/task"))
    for key in range(4):
        read = store.read(key, torch.empty(store.layout.block_bytes, dtype=torch.uint8), urgent=True)
        reader.submit(read)
        read.wait()
    after = len(os.listdir("/proc/self/task"))
    reader.close()
    torch.set_num_threads(threads)
    assert after == before


# Memory for parts


@pytest.mark.parametrize("nbytes", [[5000, 300], [5000, 0], [0, 300]])
@pytest.mark.parametrize("kept", [(0, 0), (2, 1), (1, 3)])
def test_part_memory_against_a_plain_account(nbytes: list[int], kept: tuple[int, int]) -> None:
    """Experts get under way, are given back, dropped and put at random: kept parts are whole, no two share a buffer."""
    draw, under_way = random.Random(0), 3
    memory = PartMemory(nbytes, under_way=under_way, kept=kept)
    present = {kind for kind in KINDS if nbytes[kind]}
    assert memory.nbytes == sum(sectors(nbytes[kind]) * (kept[kind] + under_way) for kind in present)
    held: dict[int, set[int]] = {key: set() for key in range(6)}
    away: dict[int, PartBuffers] = {}

    def room(kind: int) -> bool:
        return kind in present and sum(kind in own for own in held.values()) < kept[kind]

    def mark(buffer: Tensor, key: int, kind: int) -> None:
        assert len(buffer) == sectors(nbytes[kind])
        buffer.fill_(10 * key + kind)

    for _ in range(500):
        key, kind, spare = draw.randrange(6), draw.choice(KINDS), draw.randrange(under_way)
        keep = {each for each in KINDS if draw.random() < 0.5}
        action = draw.choice(("take", "take", "put", "drop"))
        if key in away:
            memory.release(key, away.pop(key), keep)
            held[key] = {each for each in keep if room(each)}
        elif action == "take":
            taken = memory.take(key, spare)
            assert (taken is None) == (under_way - len(away) <= spare)
            if taken is not None:
                assert taken.held == held[key]
                assert {each for each in KINDS if taken.buffers[each] is not None} == present
                assert all((taken.buffers[each] == 10 * key + each).all() for each in taken.held)
                for each in present:
                    mark(taken.buffers[each], key, each)
                held[key], away[key] = set(), taken
        elif action == "put":
            buffer = memory.put(key, kind)
            assert (buffer is not None) == (room(kind) and kind not in held[key])
            if buffer is not None:
                mark(buffer, key, kind)
                held[key].add(kind)
        else:
            memory.drop(key, keep)
            held[key] &= keep
        assert all(memory.held(each) == own for each, own in held.items() if each not in away)
