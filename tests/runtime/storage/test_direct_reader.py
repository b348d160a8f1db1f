"""The direct reader: every byte where it belongs, urgent ones first, and files that fail are one clear error."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from expertcast.predictors import ExpertcastError
from expertcast.runtime.storage import reader as direct_reader
from expertcast.runtime.storage.layout import SECTOR
from expertcast.runtime.storage.memory import HostMemory
from expertcast.runtime.storage.reader import PIECE, DirectReader, Read
from expertcast.runtime.storage.transfer import Transfer, TransferQueue
from tests.runtime.faults import RaiseAt


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
        (2 * PIECE, PIECE + 777, 0),
        (SECTOR, SECTOR, 64),
        (3 * PIECE, 777, 0),  # the file's end
        (0, 3 * PIECE + 777, 0),
    ],
)
@pytest.mark.parametrize(("most", "direct"), [(None, True), (11 * SECTOR // 2, True), (11 * SECTOR // 2, False)])
def test_every_byte(
    most: int | None, direct: bool, content: Tensor, path: Path, offset: int, nbytes: int, shift: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Also where reads give less than was asked for, as those of network file systems may."""
    if most is not None:
        limited(monkeypatch, most)
    reader = DirectReader(path)
    assert reader.direct
    reader.direct = direct
    target = memory(nbytes, shift)
    read = Read(target=target, offset=offset)
    reader.submit(read)
    read.wait()
    reader.close()
    assert torch.equal(target, content[offset : offset + nbytes])
    assert 0 < read.start < read.end


def test_many_at_once(content: Tensor, path: Path) -> None:
    """Any ranges, from several threads, some cancelled: what was not is right."""
    reader = DirectReader(path, threads=3)
    generator = torch.Generator().manual_seed(1)
    found: list[Read] = []
    lock = threading.Lock()

    def submit(offsets: list[int]) -> None:
        for number, offset in enumerate(offsets):
            read = Read(target=memory(5000), urgent=number % 3 == 0, offset=offset)
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


def test_a_read_is_forgotten_when_it_is_over(path: Path) -> None:
    reader = DirectReader(path)
    for number in range(5):
        read = Read(target=memory(SECTOR), offset=number * SECTOR)
        reader.submit(read)
        read.wait()
    assert list(reader._next_at.values()) == [read]
    reader.close()


class Held:
    """Holds a reader's only thread in the arrival of a first range until it is let go."""

    def __init__(self, reader: DirectReader) -> None:
        self._come, self._go = threading.Event(), threading.Event()
        self.order: list[str] = []
        self._reader = reader
        self.read = Read(target=memory(SECTOR), then=self._hold, offset=0)
        reader.submit(self.read)
        self._come.wait()

    def _hold(self, _read: Read) -> None:
        self._come.set()
        self._go.wait()

    def ask(self, name: str, offset: int, nbytes: int = SECTOR, *, urgent: bool = False) -> Read:
        """A range whose arrival is noted."""
        read = Read(urgent=urgent, target=memory(nbytes), then=lambda _: self.order.append(name), offset=offset)
        self._reader.submit(read)
        return read

    def let_go(self) -> None:
        """The thread goes on."""
        self._go.set()


def test_neighbours_are_one_request(content: Tensor, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = DirectReader(path, threads=1)
    held = Held(reader)
    near = [held.ask(str(number), number * SECTOR) for number in (3, 4, 5, 6)]
    far = held.ask("far", 9 * SECTOR)
    odd = held.ask("odd", 10 * SECTOR, 100)
    preadv, requests = os.preadv, []
    monkeypatch.setattr(os, "preadv", lambda *args: (requests.append(args), preadv(*args))[1])
    held.let_go()
    for read in (*near, far, odd):
        read.wait()
        assert torch.equal(read.target, content[read.offset : read.offset + read.nbytes])
    reader.close()
    assert len(requests) == 3
    assert held.order == ["3", "4", "5", "6", "far", "odd"]


class Clock:
    """A clock that only waits move on."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds


def test_a_slower_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges come no faster one after another than at its pace; idle time is not made up for."""
    clock = Clock()
    monkeypatch.setattr(direct_reader, "time", clock)
    reader, come = DirectReader(path, threads=1, pace=1e6), []
    for offset, idle in ((0, 0), (SECTOR, 0), (5, 0), (0, 5), (7, 0)):
        clock.now += idle
        read = Read(target=memory(100_000), offset=offset)
        reader.submit(read)
        read.wait()
        come.append(read.end)
    reader.close()
    assert come == pytest.approx([100, 100.1, 100.2, 105.2, 105.3])


def test_promoted_between_its_pieces(content: Tensor, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forecast that a layer needs while a part of it has come still arrives."""

    class Promoting(Clock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if read.pieces_read == 1:
                reader.promote(read)

    monkeypatch.setattr(direct_reader, "time", Promoting())
    reader = DirectReader(path, threads=1, pace=1e9)
    read = Read(target=memory(3 * PIECE), offset=0)
    reader.submit(read)
    waiting = threading.Thread(target=read.wait, daemon=True)
    waiting.start()
    waiting.join(60)
    assert read.done
    assert read.urgent
    reader.close()
    assert torch.equal(read.target, content[: 3 * PIECE])


def test_a_file_that_was_cut_off(path: Path) -> None:
    """One error; what lies before the cut is refused too, for it may be anything."""
    reader = DirectReader(path)
    os.truncate(path, PIECE)
    for offset in (2 * PIECE, 0):
        read = Read(target=memory(SECTOR), offset=offset)
        reader.submit(read)
        with pytest.raises(ExpertcastError, match="changed or truncated"):
            read.wait()
    reader.close()


def test_neighbours_that_come_in_parts(content: Tensor, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 11 * SECTOR // 2)
    reader = DirectReader(path, threads=1)
    held = Held(reader)
    near = [held.ask(str(number), number * SECTOR, 3 * SECTOR) for number in (3, 6, 9, 12)]
    held.let_go()
    for read in near:
        read.wait()
        assert torch.equal(read.target, content[read.offset : read.offset + read.nbytes])
    reader.close()


def limited(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """The system's reads give no more than so many bytes."""
    preadv = os.preadv

    def less(file: int, views: list[memoryview], offset: int) -> int:
        kept, left = [], most
        for view in views:
            kept.append(view[:left])
            left -= len(kept[-1])
        return preadv(file, [view for view in kept if len(view)], offset)

    monkeypatch.setattr(os, "preadv", less)


def test_beyond_the_end(path: Path) -> None:
    reader = DirectReader(path)
    beyond = Read(target=memory(SECTOR), offset=10 * PIECE)
    reader.submit(beyond)
    with pytest.raises(ExpertcastError, match="truncated"):
        beyond.wait()
    reader.close()


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt()])
def test_a_callback_that_fails(error: BaseException, content: Tensor, path: Path) -> None:
    """Whoever waits gets what it raised, and the reader goes on."""
    reader = DirectReader(path, threads=1)
    read = Read(target=memory(SECTOR), then=RaiseAt(1, error), offset=0)
    following = Read(target=memory(SECTOR), offset=SECTOR)
    for each in (read, following):
        reader.submit(each)
    with pytest.raises(type(error)):
        read.wait()
    following.wait()
    reader.close()
    assert torch.equal(following.target, content[SECTOR : 2 * SECTOR])


def test_a_target_that_cannot_be_filled(path: Path) -> None:
    """Any error of a reader's thread is that of whoever waits."""
    reader = DirectReader(path, threads=1)
    read = Read(target=memory(2 * SECTOR).view(torch.bfloat16), offset=0)
    reader.submit(read)
    with pytest.raises(TypeError, match="BFloat16"):
        read.wait()
    reader.close()


def test_a_disk_that_fails() -> None:
    """The kernel answers EIO where a process has no memory: the same to a reader as a bad sector."""
    with pytest.warns(UserWarning, match="no direct reads"):
        reader = DirectReader(Path("/proc/self/mem"))
    read = Read(target=memory(SECTOR), offset=0)
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
    read = Read(target=memory(PIECE), offset=SECTOR)
    reader.submit(read)
    read.wait()
    reader.close()
    assert torch.equal(read.target, content[SECTOR : SECTOR + PIECE])


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ExpertcastError, match="No such file"):
        DirectReader(tmp_path / "none")


def test_the_queue_of_transfers() -> None:
    """Urgent ones first, then forecasts in order; promoted, cancelled, started ones, and one that comes back."""
    queue = TransferQueue[Transfer]()
    first, second, third, miss = (Transfer(urgent=urgent) for urgent in (False, False, False, True))
    for transfer in (first, second, third, miss):
        queue.submit(transfer)
    queue.promote(third)
    assert queue.take() is miss
    assert queue.take() is third
    first.begin()
    assert queue.first() is second
    first.started = False
    queue.submit(first, front=True)
    assert queue.first() is first
    assert queue.cancel(first)
    assert queue.cancel(second)
    assert not queue.cancel(third), "it has begun"
    assert queue.first() is None
    queue.close()
    assert queue.take() is None
