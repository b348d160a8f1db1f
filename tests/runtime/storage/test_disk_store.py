"""The disk store: the same blocks, read ahead, and never a stale or damaged file without a word."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors import ExpertcastError, MoEView
from expertcast.runtime import EmulatedLink, offload
from expertcast.runtime.storage.disk_store import DiskStore, ReadAhead, populate
from expertcast.runtime.storage.memory import HostMemory
from expertcast.runtime.storage.store import ExpertStore
from tests.families.models import tiny_model
from tests.runtime.conftest import assert_same, greedy

NAME = "experts.safetensors"


def _packed(folder: Path | None, seed: int = 0, fingerprint: str | None = "a") -> tuple[DiskStore, MoEView]:
    """A store as a loaded model makes it: its file stays when the store is closed."""
    view = find_moe_layers(tiny_model("gpt_oss", seed=seed))
    store = DiskStore(view, folder, fingerprint=fingerprint)
    return store, view


def _blocks(store: ExpertStore) -> Tensor:
    return torch.stack([store.block(key) for key in range(store.layers * store.experts)]).clone()


@pytest.fixture
def expected() -> Tensor:
    view = find_moe_layers(tiny_model("gpt_oss"))
    store = ExpertStore(view)
    store.pack(view)
    return _blocks(store)


def test_same_blocks_as_in_memory(expected: Tensor, tmp_path: Path) -> None:
    store, view = _packed(tmp_path)
    store.pack(view)
    assert torch.equal(_blocks(store), expected)
    assert all(store.block(key).data_ptr() % 256 == 0 for key in range(32))
    assert not any(store.pinned_layers)
    with safe_open(tmp_path / NAME, framework="pt") as file:
        assert torch.equal(file.get_tensor("parts"), expected.flatten()), "a safetensors file that others can read"
    store.close()
    assert [entry.name for entry in tmp_path.iterdir()] == [NAME]


def test_nothing_written_to_the_blocks_reaches_the_file(expected: Tensor, tmp_path: Path) -> None:
    store, view = _packed(tmp_path)
    store.pack(view)
    store.block(3).fill_(9)
    again, _ = _packed(tmp_path)
    assert torch.equal(_blocks(again), expected)


@pytest.mark.parametrize("folder", [True, False])
def test_offload_with_the_experts_on_disk(
    folder: bool, reference_model: PreTrainedModel, one: dict[str, Tensor], tmp_path: Path
) -> None:
    """With a link that copies from another thread; afterwards the model is what it was."""
    before = greedy(reference_model, one, 5)
    arguments = {"store_folder": tmp_path} if folder else {}
    link = EmulatedLink(2e9)
    with offload(reference_model, store="disk", slots=60, link=link, predictor="next_norm", **arguments) as offloaded:
        assert isinstance(offloaded.store, DiskStore)
        path = offloaded.store.path
        assert path.exists()
        assert_same(greedy(offloaded, one, 5), before)
    assert path.exists() == folder
    assert_same(greedy(reference_model, one, 5), before)


def test_a_store_object(reference_model: PreTrainedModel, one: dict[str, Tensor], tmp_path: Path) -> None:
    before = greedy(reference_model, one, 3)
    view = find_moe_layers(reference_model)
    with offload(reference_model, store=DiskStore(view, tmp_path), slots=60) as offloaded:
        assert_same(greedy(offloaded, one, 3), before)
    other = ExpertStore(find_moe_layers(tiny_model("olmoe")))
    with pytest.raises(ExpertcastError, match="experts of another shape, dtype or number"):
        offload(reference_model, store=other)
    assert_same(greedy(reference_model, one, 3), before)


def test_a_failure_while_packing_gives_everything_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gpt_oss")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fill = DiskStore.fill

    def failing(self: DiskStore, layer: int, write: Callable[[dict[str, Tensor]], None]) -> None:
        if layer == 2:
            raise OSError("disk on fire")
        fill(self, layer, write)

    monkeypatch.setattr(DiskStore, "fill", failing)
    with pytest.raises(OSError, match="on fire"):
        offload(model, store="disk", store_folder=tmp_path)
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert list(tmp_path.iterdir()) == []


def _flip_a_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-5000, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-5000, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def test_a_damaged_block_is_found_when_the_file_has_changed(expected: Tensor, tmp_path: Path) -> None:
    store, view = _packed(tmp_path)
    store.pack(view)
    store.close()
    _flip_a_byte(tmp_path / NAME)
    with pytest.warns(UserWarning, match="is made again: part 0 of expert 30 is damaged"):
        store, view = _packed(tmp_path)
    store.pack(view)
    assert torch.equal(_blocks(store), expected)


def test_a_copied_file_is_verified_once_and_used(expected: Tensor, tmp_path: Path) -> None:
    """A copy has another time of change: the checksums decide, and the time is set right again."""
    store, view = _packed(tmp_path / "one")
    store.pack(view)
    (tmp_path / "two").mkdir()
    copy = tmp_path / "two" / NAME
    copy.write_bytes((tmp_path / "one" / NAME).read_bytes())
    store, _ = _packed(tmp_path / "two")
    assert torch.equal(_blocks(store), expected)
    assert copy.stat().st_mtime == (tmp_path / "one" / NAME).stat().st_mtime


@pytest.mark.parametrize("codec", ["raw", "bitsplit"])
def test_a_name_that_another_file_takes_at_once(codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same shape and without a fingerprint: what was packed is used, not what has the name."""
    own, other = (find_moe_layers(tiny_model("gpt_oss", seed=seed).bfloat16()) for seed in (0, 1))
    made = partial(DiskStore, codec=codec)
    taken, store = made(other, tmp_path / "other"), made(own, tmp_path / "own")
    taken.pack(other)
    replace = os.replace

    def replaced(source: Path, target: Path) -> None:
        replace(source, target)
        replace(taken.path, target)

    monkeypatch.setattr(os, "replace", replaced)
    expected = torch.cat([p.detach().clone().reshape(-1) for p in own[1].experts.parameters()])
    store.pack(own)
    assert torch.equal(
        torch.cat([store.views(1)[name].reshape(-1) for name, _ in own[1].experts.named_parameters()]), expected
    )


def test_a_store_whose_time_cannot_be_set(tmp_path: Path, expected: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's, or on a read-only file system: its checksums decide, each time."""
    store, view = _packed(tmp_path)
    store.pack(view)
    store.close()
    os.utime(tmp_path / NAME, (1, 1))

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "utime", refuse)
    for _ in range(2):
        again, _ = _packed(tmp_path)
        assert torch.equal(_blocks(again), expected)
    _flip_a_byte(tmp_path / NAME)
    with pytest.warns(UserWarning, match="is made again: part 0 of expert 30 is damaged"):
        _packed(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not a store", b"\x02\0\0\0\0\0\0\0{}", b"\xff" * 64])
def test_a_file_that_is_not_ours_is_left_alone(content: bytes, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(ExpertcastError, match="was not written by expertcast or is damaged: remove it") as caught:
        _packed(tmp_path)
    assert "\n" not in str(caught.value)
    assert (tmp_path / NAME).read_bytes() == content


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store, view = _packed(tmp_path / "file" / "folder")
    with pytest.raises(ExpertcastError, match="give another store_folder") as caught:
        store.pack(view)
    assert "\n" not in str(caught.value)


def test_read_ahead_brings_pages_in(tmp_path: Path) -> None:
    """What is read ahead is in the page table afterwards; nothing else is."""
    store, view = _packed(tmp_path)
    store.pack(view)
    assert store._ahead is not None
    store.read_ahead([3, 17])
    _until(lambda: store._ahead is not None and store._ahead.ranges_read == 2)
    assert store._ahead.ranges_read == 2
    thread = store._ahead._thread
    store.close()
    assert not thread.is_alive()
    store.read_ahead([1])  # nothing to read any more


def test_populate_maps_every_page(tmp_path: Path) -> None:
    """Counted by the system: resident pages of this process's mapping."""
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 24))
    tensor = torch.from_file(str(path), shared=False, size=1 << 24, dtype=torch.uint8)
    before = _resident_file_bytes()
    populate(tensor.data_ptr() + 100, 1 << 23)
    grown = _resident_file_bytes() - before
    if not _populates():
        pytest.skip("this system only starts reading")
    assert 1 << 23 <= grown < 1 << 24


def test_read_ahead_forgets_the_oldest_and_ends_with_its_store(tmp_path: Path) -> None:
    reader = ReadAhead(limit=2)
    reader.close()
    reader.ask([(0, 1), (8, 1), (16, 1)])
    assert list(reader._queue) == [(8, 1), (16, 1)]
    store, view = _packed(tmp_path)
    store.pack(view)
    gone = weakref.ref(store)
    del store
    gc.collect()
    assert gone() is None
    assert "expertcast-read-ahead" not in [thread.name for thread in threading.enumerate()]


def test_memory_store_reads_nothing_ahead() -> None:
    model = tiny_model("gpt_oss")
    view = find_moe_layers(model)
    store = ExpertStore(view)
    store.pack(view)
    store.read_ahead(range(32))
    assert isinstance(HostMemory(1).bytes, Tensor)


def _until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)


def _resident_file_bytes() -> int:
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(rows["RssFile"].split()[0]) * 1024


def _populates() -> bool:
    release = os.uname().release.split(".")
    return (int(release[0]), int(release[1].split("-")[0])) >= (5, 14)
