"""The disk behind a CUDA device: experts are read into a few page-locked blocks, and copied from there.

Order of one expert's way, and who waits for whom:

- the reader's threads fill a block, several experts at a time;
- the thread that runs the model notices, whenever it calls the link, and queues the copy on the copies' stream, behind
  the event of the slot's last reader, as :class:`CudaLink` does. So copies follow each other as their reads end;
- the block is free for the next read when the event behind its copy has been reached;
- who waits for an expert holds the host until it has been read, and compute's stream until it has been copied: a
  stream can wait for events of the device only. What else is read meanwhile is copied meanwhile.

Tested with real files on devices that stand in; never run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from torch import Tensor

from expertcast.data.machine import usable_processors
from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.links.base import Copy, Link
from expertcast.runtime.links.cuda import CudaLink, DeviceCopy
from expertcast.runtime.links.disk import check_disk, file_of
from expertcast.runtime.storage.layout import FULL
from expertcast.runtime.storage.memory import HostMemory, PageLock
from expertcast.runtime.storage.reader import PIECE, THREADS, Arrival, Reader, TransferQueue, sectors
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore

# Staging: a few blocks of host memory that a reader fills and copies to the device empty.
#
# An expert has a block from the request of its read until its copy to the device is done. Experts without a block wait
# in a queue, where they can be dropped. An urgent expert without a block takes that of the latest forecast whose read
# has not begun.

_FEWEST, _MOST = 4, 32
_DECODED, _COPIED = 4, 2
"""Blocks that are decoded at most, and on their way to the device, while the reader fills others."""


@dataclass(slots=True, eq=False)
class StagedCopy(DeviceCopy):
    """One expert on its way from a file to the device."""

    place: int | None = None
    """The block that it has."""
    age: float = 0.0
    """Seconds from the beginning of the read to the copy's call."""


class File(Protocol):
    """Where experts are read from; :class:`expertcast.runtime.storage.disk_store.DiskStore` is one."""

    def reader(self, threads: int, pace: float | None) -> Reader:
        """A new reader for what `read` makes."""

    def read(self, key: int, block: Tensor, arrival: Callable[[Any], None], urgent: bool) -> Arrival:
        """What is to be asked of a reader for one expert's block."""


def places_of(block_bytes: int, threads: int, *, coded: bool = False) -> int:
    """Blocks that keep so many requests of the disk under way while others are decoded, or copied to the device."""
    decoded = min(_DECODED, usable_processors() // 2) if coded else 0
    return min(_MOST, max(_FEWEST + decoded, -(-threads * PIECE // block_bytes) + _COPIED))


class Staging:
    """Blocks of host memory and the reader that fills them; all calls come from one thread.

    Args:
        file: where experts are read from.
        reader: of the file; closed with this.
        nbytes: of one expert.
        places: blocks, which are host memory beside whatever the device has.
        lock: page-locks them: None leaves them pageable.
    """

    def __init__(self, file: File, reader: Reader, nbytes: int, places: int, lock: PageLock | None = None) -> None:
        self._file, self._reader = file, reader
        size = sectors(nbytes)
        self._memory = HostMemory(places * size, lock)
        self._blocks = [self._memory.bytes[place * size :][:nbytes] for place in range(places)]
        self._free = list(range(places))
        self._queue = TransferQueue[StagedCopy](lambda copy: copy.place is None and not copy.started and not copy.done)
        self._asked: dict[StagedCopy, None] = {}
        """What the reader has and nobody has taken, in the order in which it was asked."""
        self._come: SimpleQueue[StagedCopy] = SimpleQueue()
        """Put here by the threads that read."""
        self._noticed: list[StagedCopy] = []

    def ask(self, copy: StagedCopy) -> None:
        """Have an expert read as soon as there is a block for it."""
        self._queue.push(copy)
        self._fill()

    def promote(self, copy: StagedCopy) -> None:
        """What was asked for as a forecast is urgent now."""
        if copy in self._asked:
            assert copy.read is not None
            self._reader.promote(copy.read)
        else:
            self._queue.push(copy)
            self._fill()

    def cancel(self, copy: StagedCopy) -> bool:
        """Drop one that no thread has begun to read. True if nothing of it was or will be read."""
        copy.cancelled = copy.place is None or self._take_back(copy)
        self._fill()
        return copy.cancelled

    def wait(self) -> None:
        """Return when there is something to take; something has been asked for."""
        if not self._noticed:
            self._noticed.append(self._come.get())

    @property
    def ready(self) -> bool:
        """Whether there is something to take."""
        return bool(self._noticed) or not self._come.empty()

    def take(self) -> list[StagedCopy]:
        """Those that have been read, or could not be, since the last call."""
        taken, self._noticed = self._noticed, []
        try:
            while True:
                taken.append(self._come.get_nowait())
        except Empty:
            pass
        for copy in taken:
            del self._asked[copy]
        return taken

    def block(self, copy: StagedCopy) -> Tensor:
        """uint8 [block_bytes] that has been read."""
        assert copy.place is not None
        return self._blocks[copy.place]

    def give_back(self, copy: StagedCopy) -> None:
        """The block that one had is not used any more."""
        assert copy.place is not None
        self._free.append(copy.place)
        copy.place = None
        self._fill()

    def close(self) -> None:
        """Drop what waits, and return when nothing is being read."""
        self._queue.clear()
        self._reader.close()

    def release(self) -> None:
        """Give the memory back; no copy from it is under way."""
        self._blocks.clear()
        self._memory.release()

    def _fill(self) -> None:
        """Ask the reader for as many as there are blocks."""
        while (copy := self._queue.first()) is not None:
            if not self._free and not (copy.urgent and self._make_room()):
                return
            copy.place = self._free.pop()
            copy.read = self._file.read(copy.key, self._blocks[copy.place], partial(self._read, copy), copy.urgent)
            self._asked[copy] = None
            self._reader.submit(copy.read)

    def _read(self, copy: StagedCopy, read: Arrival) -> None:
        """Called by the thread that read the last of it."""
        del read
        self._come.put(copy)

    def _make_room(self) -> bool:
        """Take the block of the forecast asked for last; it comes first when there is one again."""
        for copy in reversed(self._asked):
            if not copy.urgent and self._take_back(copy):
                self._queue.push(copy, front=True)
                return True
        return False

    def _take_back(self, copy: StagedCopy) -> bool:
        """Whether a thread has not begun an expert and will not."""
        if copy.read is None or not self._reader.cancel(copy.read):
            return False
        assert copy.place is not None
        self._free.append(copy.place)
        copy.place = copy.read = None
        del self._asked[copy]
        return True


class CudaDiskLink(CudaLink):
    """Reads a disk store's file, raw or coded, past the page cache into the slots of a model on CUDA.

    Args:
        threads: reads under way at a time.
        bandwidth: bytes per second that the disk is taken for, at most; None: as it is.
        places: blocks of page-locked host memory on the way: what this link takes beside the slots, and what `memory=`
            does not count. None: what keeps the disk's requests under way, 4 to 32 (4 for experts of 4 MiB or more; up
            to 8 where they are decoded).

    `busy_s` is the time in which anything was being read; copies to the device hide behind it.
    """

    name = "disk"
    by_address = False

    def __init__(self, threads: int = THREADS, *, bandwidth: float | None = None, places: int | None = None) -> None:
        super().__init__()
        check_disk(threads, bandwidth)
        if places is not None and places < 1:
            raise ExpertcastError(f"places={places}: give 1 or more")
        self._threads, self.bandwidth, self._places_given = threads, bandwidth, places
        self._staging: Staging | None = None
        self._free_at = 0.0
        """When the last read that was counted ended."""

    def attach(self, store: ExpertStore, pool: SlotPool) -> None:
        """
        Raises:
            ExpertcastError: the experts do not lie in a file that can be read, or the system has no memory for blocks.
        """
        file = self._file_of(store)
        super().attach(store, pool)
        self._free_at = 0.0
        places = self._places_given or places_of(self._size, self._threads, coded=not store.addressable)
        lock = PageLock() if pool.device.type == "cuda" else None
        reader = file.reader(self._threads, self.bandwidth)
        try:
            self._staging = Staging(file, reader, self._size, places, lock)
        except BaseException:
            reader.close()
            raise

    def _file_of(self, store: ExpertStore) -> File:
        return file_of(store)

    def twin(self) -> Link:
        return CudaDiskLink(self._threads, bandwidth=self.bandwidth, places=self._places_given)

    def submit(self, key: int, slot: int, *, urgent: bool, precision: str = FULL) -> Copy:
        if precision != FULL:  # lies in memory
            return super().submit(key, slot, urgent=urgent, precision=precision)
        copy = StagedCopy(key, slot, urgent)
        self._open_staging.ask(copy)
        self._pump()
        return copy

    def wait(self, copy: Copy) -> None:
        """Hold the host until the expert has been read; then make the current stream wait, and go on."""
        if isinstance(copy, StagedCopy):
            assert not copy.cancelled
            self.promote(copy)
            self._pump()
            while not (copy.started or copy.done):
                self._hold(copy)
                self._pump()
        super().wait(copy)

    def poll(self, copy: Copy) -> bool:
        if not copy.done:
            self._pump()
        return copy.done

    def promote(self, copy: Copy) -> None:
        if not isinstance(copy, StagedCopy):
            super().promote(copy)
        elif not (copy.urgent or copy.started or copy.done):
            copy.urgent = True
            self._open_staging.promote(copy)

    def cancel(self, copy: Copy) -> bool:
        if not isinstance(copy, StagedCopy):
            return super().cancel(copy)
        return not (copy.started or copy.done) and self._open_staging.cancel(copy)

    def read_ahead(self, keys: Sequence[int]) -> None:
        """Nothing to do: pages of a mapped file are not used."""

    def close(self) -> None:
        if self._staging is not None:
            self._staging.close()
            super().close()
            self._staging.release()
            self._staging = None

    def _hold(self, copy: StagedCopy) -> None:
        """Something happens that the copy waits for: a block becomes free, or is filled."""
        if copy.place is None and self._issued:
            oldest = self._issued[0].arrived
            assert oldest is not None
            oldest.synchronize()  # type: ignore[no-untyped-call]
        else:
            self._until_read(self._open_staging)

    def _until_read(self, staging: Staging) -> None:
        """Hold the host until a block has been filled."""
        staging.wait()

    def _pump(self) -> None:
        super()._pump()
        if self._staging is None:
            return
        for copy in self._staging.take():
            assert copy.read is not None
            if copy.read.error is None:
                copy.age = self.clock() - copy.read.start
                self._issue(copy)
            else:
                copy.error, copy.done = copy.read.error, True
            if copy.error is not None:
                self._staging.give_back(copy)

    def _source(self, copy: DeviceCopy) -> Tensor:
        if isinstance(copy, StagedCopy):
            return self._open_staging.block(copy)
        return super()._source(copy)

    def _finish(self, copy: DeviceCopy) -> None:
        if isinstance(copy, StagedCopy):  # first: whatever an observer raises, the block is free
            self._open_staging.give_back(copy)
        super()._finish(copy)

    def _count(self, copy: Copy, start: float, end: float) -> None:
        """`start` is the copy's to the device; for whoever observes, the expert's way began with its read."""
        if not isinstance(copy, StagedCopy):
            super()._count(copy, start, end)
            return
        assert copy.read is not None
        busy_s, read = self.busy_s, copy.read
        self.bytes_read += read.bytes_read
        super()._count(copy, start - copy.age, end)
        self.busy_s = busy_s + max(0.0, read.end - max(read.start, self._free_at))  # reads overlap: counted once
        self._free_at = max(self._free_at, read.end)

    @property
    def _open_staging(self) -> Staging:
        assert self._staging is not None, "the link is closed"
        return self._staging
