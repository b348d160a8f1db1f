"""A disk store's file says the same as when it was written, or is not used: by bits, by members, and in full."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors import ExpertcastError
from expertcast.runtime.storage import expert_file as coded_file
from expertcast.runtime.storage import expert_file as draft
from expertcast.runtime.storage import expert_file as store_file
from expertcast.runtime.storage.disk_store import CodedStore, DiskStore
from expertcast.runtime.storage.expert_file import (
    FILE_NAME,
    Draft,
    StaleFileError,
    StoreFile,
    read_header,
    verify_store,
)
from tests.families.models import tiny_model


@pytest.fixture
def path(tmp_path: Path) -> Path:
    view = find_moe_layers(tiny_model("gpt_oss"))
    store = DiskStore(view, tmp_path, fingerprint="a")
    store.pack(view)
    store.close()
    return tmp_path / FILE_NAME


def _refused(path: Path) -> bool:
    try:
        StoreFile.open(path)
    except (StaleFileError, ExpertcastError) as error:
        return "\n" not in str(error)
    return False


def _rewritten(path: Path, change: Callable[[Any], None]) -> None:
    """The header's JSON changed, its length kept to whole pages."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + size])
    change(entries)
    text = json.dumps(entries).encode()
    assert len(text) <= size
    path.write_bytes(content[:8] + text.ljust(size) + content[8 + size :])


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
        lambda entries: entries["layer.1"].update(data_offsets=entries["layer.2"]["data_offsets"]),
        lambda entries: entries["layer.1"].update(shape=entries["layer.1"]["shape"][::-1]),
        lambda entries: entries["layer.0"].update(shape=[1 << 40, 1 << 40]),
        lambda entries: entries["layer.0"].update(shape=[10**30, 1]),
        lambda entries: entries["layer.0"].update(shape=[-1, 5]),
        lambda entries: entries["layer.0"].update(dtype="BF16"),
        lambda entries: entries.pop("layer.3"),
        lambda entries: entries.update({"layer.4": entries["layer.3"]}),
        lambda entries: entries.update({"layer.0": None}),
        lambda entries: entries["__metadata__"].update(checksums="00000000 " * 3 + "00000000"),
        lambda entries: entries["__metadata__"].update(checksums="0"),
        lambda entries: entries["__metadata__"].update(changed="9" * 12),
        lambda entries: entries["__metadata__"].update(model_id="other"),
        lambda entries: entries["__metadata__"].update(more="1"),
        lambda entries: entries["__metadata__"].update(layout=[[]]),
        lambda entries: entries["__metadata__"].pop("layout"),
    ],
)
def test_a_changed_header_is_refused(change: Callable[[Any], None], path: Path) -> None:
    _rewritten(path, change)
    assert _refused(path)
    with pytest.raises(ExpertcastError, match=r"is damaged: .*; remove it, and the next load packs") as caught:
        verify_store(path.parent)
    assert str(path) in str(caught.value)


def test_a_file_from_before_the_digest_is_read_with_a_warning(path: Path) -> None:
    header = read_header(path)
    assert header.sealed
    old = replace(header, sealed=False).encoded()
    assert len(old) == len(header.encoded())
    with path.open("r+b") as file:
        file.write(old)
    with pytest.warns(UserWarning, match="was written by an older expertcast"):
        opened = StoreFile.open(path)
    assert opened.form == header.form
    assert path.stat().st_mtime == header.changed


def test_all_of_it_is_verified(path: Path) -> None:
    """Also what a disk changed, which leaves no trace in the file's time of change."""
    verify_store(path)
    verify_store(path.parent)
    time = path.stat().st_mtime
    with path.open("r+b") as file:
        file.seek(-5000, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-5000, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    os.utime(path, (time, time))
    assert not _refused(path)
    with pytest.raises(ExpertcastError, match="layer 3 is damaged; remove it"):
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


@pytest.mark.parametrize(("where", "name"), [(draft, "_lock"), (store_file, "_reserve"), (coded_file, "bytes")])
def test_an_interrupt_leaves_no_file(where: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty one would stay for ever: the next process takes it for one that is about to be locked."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(where, name, interrupted, raising=False)
    made = partial(CodedStore, codec="bitsplit") if where is coded_file else DiskStore
    view = find_moe_layers(tiny_model("gpt_oss"))
    with pytest.raises(KeyboardInterrupt):
        made(view, tmp_path).pack(view)
    assert list(tmp_path.iterdir()) == []


def test_what_killed_processes_left_is_removed(path: Path) -> None:
    """But not what another one is writing, or is about to."""
    left, starting = path.with_name(f"{FILE_NAME}.1.partial"), path.with_name(f"{FILE_NAME}.2.partial")
    left.write_bytes(bytes(1000))
    starting.touch()
    form = read_header(path).form
    writing = StoreFile.create(Draft(path), form)
    assert sorted(path.parent.iterdir()) == sorted([path, starting, writing.path])
    held = writing.path.with_name(f"{FILE_NAME}.3.partial")
    writing.path.rename(held)
    StoreFile.create(Draft(path), form)
    assert held.exists()
    del writing
    StoreFile.create(Draft(path), form)
    assert not held.exists()
