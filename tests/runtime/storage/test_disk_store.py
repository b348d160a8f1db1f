"""Stores on disk: the blocks of one in memory, whatever codec made them, and never a stale or damaged file unsaid.

A store without a folder has a file without a name, so that nothing stays of a process that is killed.
"""

from __future__ import annotations

import errno
import gc
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from expertcast import offload
from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors import ExpertcastError, MoEView
from expertcast.predictors.artefacts import digest
from expertcast.runtime.storage import expert_file
from expertcast.runtime.storage.disk_store import DiskStore
from expertcast.runtime.storage.expert_file import (
    FILE_NAME,
    ExpertFile,
    ExpertWriter,
    StaleFileError,
    read_header,
    verify_store,
)
from expertcast.runtime.storage.store import ExpertStore
from tests.families.models import tiny_model
from tests.runtime.conftest import assert_same, greedy, refused
from tests.runtime.storage.codecs.layouts import cut_into

INPUTS = {"input_ids": torch.arange(1, 9)[None]}
CODECS = ["raw", "bitsplit"]
EITHER = pytest.mark.parametrize("codec", CODECS)


def _store(folder: Path | None, codec: str = "raw", seed: int = 0) -> tuple[DiskStore, MoEView]:
    """A store as a loaded model makes it: its file stays when the store is closed."""
    view = find_moe_layers(tiny_model("gpt_oss", dtype=torch.bfloat16, seed=seed))
    return DiskStore(view, folder, codec=codec, fingerprint="a"), view


def _packed(folder: Path | None, codec: str = "raw", seed: int = 0) -> DiskStore:
    store, view = _store(folder, codec, seed)
    store.pack(view)
    return store


def _blocks(store: ExpertStore) -> Tensor:
    return torch.stack([store.block(key) for key in range(store.layers * store.experts)]).clone()


@pytest.fixture(scope="module")
def expected() -> Tensor:
    view = find_moe_layers(tiny_model("gpt_oss", dtype=torch.bfloat16))
    store = ExpertStore(view)
    store.pack(view)
    return _blocks(store)


@pytest.mark.parametrize(("codec", "shards"), [("raw", 1), ("bitsplit", 1), ("bitsplit", 3)])
def test_same_blocks_as_in_memory(
    codec: str, shards: int, expected: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the file is found again, layer by layer, and by others who read safetensors. Its folder is made."""
    cut_into(shards, monkeypatch)
    folder = tmp_path / "of" / "a model"
    store = _packed(folder, codec)
    assert torch.equal(_blocks(store), expected)
    for layer in range(store.layers):
        views = store.layout.views(expected[8 * layer : 8 * layer + 8].flatten())
        assert all(torch.equal(view, views[name]) for name, view in store.views(layer).items())
    assert all(store.block(key).data_ptr() % 256 == 0 for key in range(32))
    assert not any(store._memory)
    store.block(3).fill_(9)  # of memory, never of the file
    store.close()
    assert [entry.name for entry in folder.iterdir()] == [FILE_NAME]
    again, _ = _store(folder, codec)
    assert again.holds(0)
    assert torch.equal(_blocks(again), expected)
    with safe_open(folder / FILE_NAME, framework="pt") as file:
        parts = file.get_tensor("parts")
        assert torch.equal(parts, expected.flatten()) if codec == "raw" else len(parts) > again.stored_nbytes
        assert int(file.get_tensor("nbytes").sum()) == again.stored_nbytes


@pytest.mark.parametrize(
    ("link", "folder", "codec"),
    [("disk", True, "raw"), ("disk", False, "bitsplit"), ("instant", False, "raw"), ("instant", True, "bitsplit")],
)
def test_offload_with_the_experts_on_disk(
    link: str, folder: bool, codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By every link; afterwards the model is what it was, and a file without a name is gone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    model = tiny_model("qwen3_moe")
    before = greedy(model, INPUTS)
    given = {"store_folder": tmp_path / "own"} if folder else {}
    with offload(
        model, store="disk", codec=codec, slots=6, link=link, predictor="next_norm", forecasts="always", **given
    ) as offloaded:
        assert isinstance(offloaded.store, DiskStore)
        path = offloaded.store.path
        assert path.stat().st_size > 0
        assert_same(greedy(offloaded, INPUTS), before)
        file = os.stat(path)
    del offloaded
    gc.collect()
    assert not list((tmp_path / "temporary").iterdir())
    assert (tmp_path / "own" / FILE_NAME).exists() == folder
    assert (file.st_dev, file.st_ino) not in _open_files()
    assert_same(greedy(model, INPUTS), before)


def test_a_store_object(reference_model: PreTrainedModel, one: dict[str, Tensor], tmp_path: Path) -> None:
    before = greedy(reference_model, one, 3)
    with offload(reference_model, store=DiskStore(find_moe_layers(reference_model), tmp_path), slots=60) as offloaded:
        assert_same(greedy(offloaded, one, 3), before)
    other = ExpertStore(find_moe_layers(tiny_model("olmoe")))
    with pytest.raises(ExpertcastError, match="experts of another shape, dtype or number"):
        offload(reference_model, store=other)
    assert_same(greedy(reference_model, one, 3), before)


# Packing that fails


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


@pytest.mark.parametrize(("codec", "share"), [("raw", 1), ("bitsplit", 0.5)])
@pytest.mark.parametrize("named", [True, False])
def test_a_disk_without_room_is_found_before_packing(
    named: bool, codec: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codec raw takes all bytes; of a compressed plane nothing is known before."""
    store, view = _store(tmp_path / "store" if named else None, codec)
    least = int(share * store.nbytes)
    usage = namedtuple("usage", "total used free")
    asked: list[Path] = []

    def of(folder: Path) -> object:
        asked.append(Path(folder))
        return usage(10**12, 10**12, least - 1)

    monkeypatch.setattr(shutil, "disk_usage", of)
    with refused(f"has {least - 1} bytes free, but .* need at least {least}: "):
        store.pack(view)
    assert asked == [tmp_path / "store" if named else Path(tempfile.gettempdir())]
    assert not named or not list((tmp_path / "store").iterdir())
    assert not view[0].experts.gate_up_proj.is_meta, "the weights are still there"
    least += 1
    store.pack(view)
    assert store.holds(0)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused("give another store_folder"):
        _packed(tmp_path / "file" / "folder")


# Files that are there


def test_a_copied_file_is_verified_once_and_used(expected: Tensor, tmp_path: Path) -> None:
    """A copy has another time of change: the checksums decide, and the time is set right again."""
    _packed(tmp_path / "one")
    (tmp_path / "two").mkdir()
    copy = tmp_path / "two" / FILE_NAME
    copy.write_bytes((tmp_path / "one" / FILE_NAME).read_bytes())
    store, _ = _store(tmp_path / "two")
    assert torch.equal(_blocks(store), expected)
    assert copy.stat().st_mtime == (tmp_path / "one" / FILE_NAME).stat().st_mtime


@EITHER
def test_a_name_that_another_file_takes_at_once(codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same shape: what was packed is used, not what has the name."""
    taken, (store, view) = _packed(tmp_path / "other", codec, seed=1), _store(tmp_path / "own", codec)
    replace = os.replace

    def replaced(source: Path, target: Path) -> None:
        replace(source, target)
        replace(taken.path, target)

    monkeypatch.setattr(os, "replace", replaced)
    weights = {name: parameter.detach().clone() for name, parameter in view[1].experts.named_parameters()}
    store.pack(view)
    assert all(torch.equal(store.views(1)[name], weight) for name, weight in weights.items())


def test_a_store_whose_time_cannot_be_set(tmp_path: Path, expected: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's, or on a read-only file system: its checksums decide, each time."""
    _packed(tmp_path).close()
    os.utime(tmp_path / FILE_NAME, (1, 1))

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "utime", refuse)
    for _ in range(2):
        assert torch.equal(_blocks(_store(tmp_path)[0]), expected)
    flip_a_byte(tmp_path / FILE_NAME)
    with pytest.warns(UserWarning, match="is rebuilt: part 0 of expert 30 is damaged"):
        _store(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not a store", b"\x02\0\0\0\0\0\0\0{}", b"\xff" * 64])
def test_a_file_that_is_not_ours_is_left_alone(content: bytes, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    with refused("was not written by expertcast or is damaged: remove it"):
        _store(tmp_path)
    assert (tmp_path / FILE_NAME).read_bytes() == content


# Stores without a folder


@EITHER
@pytest.mark.parametrize("when", ["packing", "running"])
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_killed_process_leaves_nothing(when: str, codec: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_wait_to_be_killed, args=(when, codec, tmp_path, there))
    process.start()
    assert here.poll(60)
    held = [os.readlink(handle) for handle in Path(f"/proc/{process.pid}/fd").iterdir()]
    assert [place for place in held if place.startswith(str(tmp_path))], "the experts are there"
    process.kill()
    process.join()
    assert list(tmp_path.iterdir()) == []


def _wait_to_be_killed(when: str, codec: str, folder: Path, there: Connection) -> None:
    torch.set_num_threads(1)  # OpenMP's threads stay behind in the parent
    tempfile.tempdir = str(folder)

    def stop(*_: object) -> None:
        there.send("now")
        time.sleep(600)

    if when == "packing":
        DiskStore.finish = stop  # type: ignore[method-assign]
    with offload(tiny_model("qwen3_moe"), store="disk", codec=codec, slots=6) as offloaded:
        greedy(offloaded, INPUTS)
        stop()


def test_it_is_filled_again_beside_what_is_in_use() -> None:
    store, view = _store(None)
    store.pack(view)
    first = store.block(0)
    before = first.clone()
    store.pack(_store(None, seed=1)[1])
    assert torch.equal(first, before)
    assert not torch.equal(store.block(0), before)
    store.close()


@EITHER
@pytest.mark.skipif(sys.platform != "linux", reason="truncates a file without a name")
def test_errors_of_a_file_without_a_name_name_its_folder(
    codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    offloaded = offload(tiny_model("qwen3_moe"), store="disk", codec=codec, slots=6)
    os.truncate(offloaded.store.path, 5000)  # type: ignore[attr-defined]
    for use in (lambda: greedy(offloaded, INPUTS), offloaded.close):
        with refused(f"^the temporary store in '{tmp_path}' (was changed or truncated|cannot be read: it was trunc)"):
            use()


def _open_files() -> set[tuple[int, int]]:
    """Device and number of each file that this process has open."""
    found = set()
    for handle in Path("/proc/self/fd").iterdir():
        try:
            status = handle.stat()
        except OSError:  # the listing's own
            continue
        found.add((status.st_dev, status.st_ino))
    return found


# Changes of a store's file


def flip_a_byte(path: Path, *, from_end: int = 5000) -> None:
    """Of the parts, by default: behind them comes the index."""
    with path.open("r+b") as file:
        file.seek(-from_end, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-from_end, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def rewrite_header(path: Path, change: Callable[[Any], None]) -> None:
    """Change the header's JSON, in its room."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + size])
    change(entries)
    text = json.dumps(entries).encode()
    assert len(text) <= size
    path.write_bytes(content[:8] + text.ljust(size) + content[8 + size :])


def say(entries: Any, **changes: object) -> None:
    """Other values in the header's own part, under the old digest."""
    metadata = entries["__metadata__"]
    metadata["header"] = json.dumps(json.loads(metadata["header"]) | changes)


# A file says the same as when it was written, or is not used: by bits, by members, and in full


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("packed")
    view = find_moe_layers(tiny_model("gpt_oss"))
    store = DiskStore(view, folder, fingerprint="a")
    store.pack(view)
    store.close()
    return (folder / FILE_NAME).read_bytes()


@pytest.fixture
def path(packed: bytes, tmp_path: Path) -> Path:
    """Of a store's file, which has just been opened for the first time."""
    path = tmp_path / FILE_NAME
    path.write_bytes(packed)
    ExpertFile(path)
    return path


def _refused(path: Path) -> bool:
    try:
        ExpertFile(path)
    except (StaleFileError, ExpertcastError) as error:
        return "\n" not in str(error)
    return False


def test_every_byte_of_the_header_counts(path: Path) -> None:
    """The blanks that fill its last page included, and wherever the file's time of change stands."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    rng = random.Random(0)
    for place in [*range(900), *rng.sample(range(900, end), 100)]:
        changed = bytearray(content[:end])
        changed[place] ^= 1 << rng.randrange(8)
        with path.open("r+b") as file:
            file.write(changed)
        os.utime(path, (1, 1))
        assert _refused(path), place


@pytest.mark.parametrize(
    "change",
    [
        lambda entries: entries["nbytes"].update(data_offsets=entries["offsets"]["data_offsets"]),
        lambda entries: entries["nbytes"].update(shape=entries["nbytes"]["shape"][::-1]),
        lambda entries: entries["parts"].update(shape=[10**30]),
        lambda entries: entries["parts"].update(dtype="BF16"),
        lambda entries: entries.pop("digests"),
        lambda entries: entries.update(more=entries["parts"]),
        lambda entries: entries.update(parts=None),
        lambda entries: entries.update(offsets=None),
        lambda entries: entries["__metadata__"].update(more="1"),
        lambda entries: entries["__metadata__"].update(header="[" * 500),
        lambda entries: entries["__metadata__"].pop("header"),
        lambda entries: say(entries, layers=5),
        lambda entries: say(entries, layers=-1),
        lambda entries: say(entries, block_bytes=1 << 62),
        lambda entries: say(entries, nbytes="1"),
        lambda entries: say(entries, index="xxh3:0"),
        lambda entries: say(entries, changed=10**12 - 1),
        lambda entries: say(entries, model_id="other"),
        lambda entries: say(entries, layout=[[]]),
        lambda entries: say(entries, codec=None),
    ],
)
def test_a_changed_header_is_refused(change: Callable[[Any], None], path: Path) -> None:
    rewrite_header(path, change)
    assert _refused(path)
    with pytest.raises(ExpertcastError, match=r"is damaged: .*; remove it, and the next load packs") as caught:
        verify_store(path.parent)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(("row", "value"), [(0, 0), (0, 1 << 40), (1, 0), (1, 1 << 40)])
def test_an_index_of_other_places_or_sizes_is_refused(row: int, value: int, path: Path) -> None:
    """Also with a digest that fits: no part is empty, or outside the parts' room."""
    header, content = read_header(path), bytearray(path.read_bytes())
    begin = header.room + header.nbytes
    place = begin + header.index_nbytes // 3 * row
    content[place : place + 8] = value.to_bytes(8, "little")
    content[: header.room] = replace(header, index=digest(content[begin:])).encoded()
    path.write_bytes(content)
    with pytest.raises(StaleFileError, match="its index is damaged"):
        ExpertFile(path)


def test_all_of_it_is_verified(path: Path) -> None:
    """Also what a disk changed, which leaves no trace in the file's time of change."""
    verify_store(path)
    verify_store(path.parent)
    time = path.stat().st_mtime
    flip_a_byte(path)
    os.utime(path, (time, time))
    assert not _refused(path)
    with pytest.raises(ExpertcastError, match="part 0 of expert 30 is damaged; remove it"):
        verify_store(path.parent)


@pytest.mark.parametrize("size", [0, 7, 8, 100, 4096, -1])
def test_a_shorter_file(size: int, path: Path) -> None:
    path.write_bytes(path.read_bytes()[:size])
    assert _refused(path)
    with pytest.raises(ExpertcastError, match=f"{FILE_NAME}.*remove it"):
        verify_store(path)


def test_what_is_no_file(path: Path, tmp_path: Path) -> None:
    path.unlink()
    for make in (path.mkdir, lambda: os.mkfifo(path)):  # a pipe would be waited on for ever
        make()
        with pytest.raises(ExpertcastError, match=r"cannot read .*: .*; remove it"):
            verify_store(path)
        path.rmdir() if path.is_dir() else path.unlink()
    with pytest.raises(ExpertcastError, match="No such file or directory; remove it"):
        verify_store(tmp_path / "none")


def test_a_header_is_not_longer_than_its_file(path: Path) -> None:
    """Nothing is allocated or looked through by a number in the file."""
    content = bytearray(path.read_bytes())
    content[:8] = (1 << 62).to_bytes(8, "little")
    path.write_bytes(bytes(content))
    assert _refused(path)


@pytest.mark.parametrize("name", ["create_partial", "bytes"])
def test_an_interrupt_leaves_no_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(expert_file, name, interrupted, raising=False)
    view = find_moe_layers(tiny_model("gpt_oss"))
    with pytest.raises(KeyboardInterrupt):
        DiskStore(view, tmp_path, codec="bitsplit").pack(view)
    assert list(tmp_path.iterdir()) == []


def test_what_killed_processes_left_is_removed(path: Path) -> None:
    """But not what another one is writing."""
    left, empty = path.with_name(f"{FILE_NAME}.00000001.partial"), path.with_name(f"{FILE_NAME}.00000002.partial")
    left.write_bytes(bytes(1000))
    empty.touch()  # killed before the first bytes were written
    form = read_header(path)
    writing = ExpertWriter(path, form)
    assert sorted(path.parent.iterdir()) == sorted([path, writing._path])
    held = writing._path.with_name(f"{FILE_NAME}.00000003.partial")
    writing._path.rename(held)
    ExpertWriter(path, form)
    assert held.exists()
    del writing
    ExpertWriter(path, form)
    assert not held.exists()
