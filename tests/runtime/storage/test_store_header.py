"""A disk store's file says the same as when it was written, or is not used: by bits, by members, and in full."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors import ExpertcastError
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
from tests.families.models import tiny_model
from tests.runtime.storage.damage import flip_a_byte, rewrite_header, say


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


def test_a_file_of_an_older_version_is_made_again(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content.replace(b"expertcast-experts-1", b"expertcast-store-1  ", 1))
    with pytest.raises(ExpertcastError, match="made by an older version; remove it, and the next load packs"):
        verify_store(path)


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


@pytest.mark.parametrize("name", ["_lock", "bytes"])
def test_an_interrupt_leaves_no_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty one would stay for ever: the next process takes it for one that is about to be locked."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(expert_file, name, interrupted, raising=False)
    view = find_moe_layers(tiny_model("gpt_oss"))
    with pytest.raises(KeyboardInterrupt):
        DiskStore(view, tmp_path, codec="bitsplit").pack(view)
    assert list(tmp_path.iterdir()) == []


def test_what_killed_processes_left_is_removed(path: Path) -> None:
    """But not what another one is writing, or is about to."""
    left, starting = path.with_name(f"{FILE_NAME}.1.partial"), path.with_name(f"{FILE_NAME}.2.partial")
    left.write_bytes(bytes(1000))
    starting.touch()
    form = read_header(path)
    writing = ExpertWriter(path, form)
    assert sorted(path.parent.iterdir()) == sorted([path, starting, writing._path])
    held = writing._path.with_name(f"{FILE_NAME}.3.partial")
    writing._path.rename(held)
    ExpertWriter(path, form)
    assert held.exists()
    del writing
    ExpertWriter(path, form)
    assert not held.exists()
