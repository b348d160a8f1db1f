"""The direct reader: every byte where it belongs, urgent ones first, and files that fail are one clear error."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from expertcast.predictors import ExpertcastError
from expertcast.runtime.storage import direct_reader
from expertcast.runtime.storage.direct_read import PIECE, SECTOR, Read
from expertcast.runtime.storage.direct_reader import DirectReader
from expertcast.runtime.storage.host_memory import HostMemory


@pytest.fixture(scope="module")
def content() -> Tensor:
    """Three pieces and some odd bytes."""
    return torch.randint(256, (3 * PIECE + 777,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


@pytest.fixture
def path(content: Tensor, tmp_path: Path) -> Path:
    file = tmp_path / "file"
    file.write_bytes(content.numpy().tobytes())
    return file


def memory(nbytes: int, shift: int = 0) -> Tensor:
    """uint8 [nbytes], so many bytes behind the start of a page."""
    return HostMemory(nbytes + shift).bytes[shift:]


@pytest.mark.parametrize(
    ("offset", "nbytes", "shift"),
    [
        (0, SECTOR, 0),
        (SECTOR, 2 * PIECE, 0),  # shared by threads
        (2 * SECTOR, 100, 0),
        (5, 2 * PIECE + 3, 0),  # nothing lies at a sector
        (SECTOR, SECTOR, 64),
        (3 * PIECE, 777, 0),  # the file's end
        (0, 3 * PIECE + 777, 0),
    ],
)
def test_every_byte(content: Tensor, path: Path, offset: int, nbytes: int, shift: int) -> None:
    reader = DirectReader(path)
    target = memory(nbytes, shift)
    read = Read(target, offset=offset)
    reader.submit(read)
    read.wait()
    reader.close()
    assert torch.equal(target, content[offset : offset + nbytes])
    assert 0 < read.start < read.end
    assert reader.direct


def test_many_at_once(content: Tensor, path: Path) -> None:
    """Any ranges, from several threads, some cancelled: what was not is right."""
    reader = DirectReader(path, threads=3)
    generator = torch.Generator().manual_seed(1)
    found: list[Read] = []
    lock = threading.Lock()

    def submit(offsets: list[int]) -> None:
        for number, offset in enumerate(offsets):
            read = Read(memory(5000), urgent=number % 3 == 0, offset=offset)
            reader.submit(read)
            if number % 5 == 4:
                reader.promote(read)
            with lock:
                found.append(read)

    starts = torch.randint(3 * PIECE - 5000, (4, 50), generator=generator).tolist()
    threads = [threading.Thread(target=submit, args=(offsets,)) for offsets in starts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dropped = {id(read) for read in found[::7] if reader.cancel(read)}
    for read in found:
        if id(read) not in dropped:
            read.wait()
            assert torch.equal(read.target, content[read.offset : read.offset + 5000])
    reader.close()


class Held:
    """Holds a reader's only thread in the arrival of a first range until it is let go."""

    def __init__(self, reader: DirectReader) -> None:
        self._come, self._go = threading.Event(), threading.Event()
        self.order: list[str] = []
        self._reader = reader
        reader.submit(Read(memory(SECTOR), self._hold, offset=0))
        self._come.wait()

    def _hold(self, _read: Read) -> None:
        self._come.set()
        self._go.wait()

    def ask(self, name: str, offset: int, nbytes: int = SECTOR, *, urgent: bool = False) -> Read:
        """A range whose arrival is noted."""
        read = Read(memory(nbytes), lambda _: self.order.append(name), urgent, offset=offset)
        self._reader.submit(read)
        return read

    def let_go(self) -> None:
        """The thread goes on."""
        self._go.set()


def test_urgent_ones_first(path: Path) -> None:
    reader = DirectReader(path, threads=1)
    held = Held(reader)
    reads = [held.ask("forecast", 8 * SECTOR), held.ask("promoted", 4 * SECTOR), held.ask("dropped", 6 * SECTOR)]
    reads.append(held.ask("miss", 2 * SECTOR, urgent=True))
    reader.promote(reads[1])
    assert reader.cancel(reads[2])
    held.let_go()
    for read in (reads[0], reads[1], reads[3]):
        read.wait()
    reader.close()
    assert held.order == ["miss", "promoted", "forecast"]
    assert not reader.cancel(reads[0]), "it has been read"


def test_neighbours_are_one_request(content: Tensor, path: Path) -> None:
    reader = DirectReader(path, threads=1)
    held = Held(reader)
    near = [held.ask(str(number), number * SECTOR) for number in (3, 4, 5, 6)]
    far = held.ask("far", 9 * SECTOR)
    odd = held.ask("odd", 10 * SECTOR, 100)
    before = reader.requests
    held.let_go()
    for read in (*near, far, odd):
        read.wait()
        assert torch.equal(read.target, content[read.offset : read.offset + read.nbytes])
    reader.close()
    assert reader.requests - before == 3
    assert held.order == ["3", "4", "5", "6", "far", "odd"]


def test_a_file_that_was_cut_off(path: Path) -> None:
    """One error; what lies before the cut is refused too, for it may be anything."""
    reader = DirectReader(path)
    os.truncate(path, PIECE)
    for offset in (2 * PIECE, 0):
        read = Read(memory(SECTOR), offset=offset)
        reader.submit(read)
        with pytest.raises(ExpertcastError, match="changed or cut off"):
            read.wait()
    reader.close()


def test_a_disk_that_fails() -> None:
    """The kernel answers EIO where a process has no memory: the same to a reader as a bad sector."""
    with pytest.warns(UserWarning, match="no direct reads"):
        reader = DirectReader(Path("/proc/self/mem"))
    read = Read(memory(SECTOR), offset=0)
    reader.submit(read)
    with pytest.raises(ExpertcastError, match=r"'/proc/self/mem' cannot be read: Input/output error"):
        read.wait()
    reader.close()


def test_a_file_system_without_direct_reads(content: Tensor, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refuse(name: object, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return opened(str(name), flags, *rest)

    monkeypatch.setattr(direct_reader.os, "open", refuse)
    with pytest.warns(UserWarning, match="page cache"):
        reader = DirectReader(path)
    read = Read(memory(PIECE), offset=SECTOR)
    reader.submit(read)
    read.wait()
    reader.close()
    assert torch.equal(read.target, content[SECTOR : SECTOR + PIECE])


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ExpertcastError, match="No such file"):
        DirectReader(tmp_path / "none")
