"""The disk behind a CUDA device: experts are read into a few page-locked blocks, and copied from there.

A transfer of an expert is a read, then a copy:

- the reader's threads fill a block, several experts at a time;
- the thread that runs the model notices, whenever it calls the link, and queues the copy on the copies' stream, behind
  the event of the slot's last reader, as :class:`CudaLink` does. So copies follow each other as their reads end;
- the block is free for the next read when the event behind its copy has been reached. Experts without a block wait in
  the link's queue, where they can be dropped; an urgent one takes the block of the latest forecast whose read has not
  begun;
- a wait for an expert holds the host until it has been read, and compute's stream until it has been copied: a stream
  can wait for events of the device only. Other experts are read and copied meanwhile.

Tested with real files on devices that stand in; never run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue

from torch import Tensor

from expertcast.data.machine import usable_processors
from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.links.base import Link
from expertcast.runtime.links.cuda import CudaLink
from expertcast.runtime.links.disk import check_disk, file_of
from expertcast.runtime.storage.coded_reader import CodedRead
from expertcast.runtime.storage.disk_store import DiskStore
from expertcast.runtime.storage.layout import FULL
from expertcast.runtime.storage.memory import HostMemory, PageLock
from expertcast.runtime.storage.reader import PIECE, THREADS, Read, sectors
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from expertcast.runtime.storage.transfer import Transfer

_FEWEST, _MOST = 4, 32
_DECODED, _COPIED = 4, 2
"""Blocks that are decoded at most, and on their way to the device, while the reader fills others."""


def places_of(block_bytes: int, threads: int, *, coded: bool = False) -> int:
    """Blocks that keep so many requests of the disk under way while others are decoded, or copied to the device."""
    decoded = min(_DECODED, usable_processors() // 2) if coded else 0
    return min(_MOST, max(_FEWEST + decoded, -(-threads * PIECE // block_bytes) + _COPIED))


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
        self._memory: HostMemory | None = None

    def attach(self, store: ExpertStore, pool: SlotPool) -> None:
        """
        Raises:
            ExpertcastError: the experts do not lie in a file that can be read, or the system has no memory for blocks.
        """
        self._file = self._file_of(store)
        super().attach(store, pool)
        count = self._places_given or places_of(self._size, self._threads, coded=not store.addressable)
        place_bytes = sectors(self._size)
        memory = HostMemory(count * place_bytes, PageLock() if pool.device.type == "cuda" else None)
        self._free = [memory.bytes[place * place_bytes :][: self._size] for place in range(count)]
        self._reads: dict[Transfer, Read | CodedRead] = {}
        """The read of each transfer that has a block, in the order in which they got it."""
        self._come: SimpleQueue[Transfer] = SimpleQueue()
        """Transfers that have been read and not yet copied on; the threads that read put them here."""
        self._free_at = 0.0
        """When the last read that was counted ended."""
        self._reader = self._file.reader(self._threads, self.bandwidth)
        self._memory = memory

    def _file_of(self, store: ExpertStore) -> DiskStore:
        return file_of(store)

    def unattached_copy(self) -> Link:
        return CudaDiskLink(self._threads, bandwidth=self.bandwidth, places=self._places_given)

    def wait(self, copy: Transfer) -> None:
        """Hold the host until the expert has been read; then make the current stream wait, and go on."""
        self.promote(copy)
        while copy.arrived is None and not copy.done:
            if not copy.started and self._issued:  # it has no block
                self._issued[0].arrived.synchronize()
            else:
                self._until_read()
            self._pump()
        super().wait(copy)

    def promote(self, copy: Transfer) -> None:
        read = self._reads.get(copy)
        if read is not None and copy.arrived is None:
            copy.urgent = True
            self._reader.promote(read)  # type: ignore[arg-type]  # of the reader's own kind
        super().promote(copy)

    def cancel(self, copy: Transfer) -> bool:
        """Drop one that no thread has begun to read. True if nothing of it was or will be read."""
        self._take_back(copy)
        cancelled = super().cancel(copy)
        self._pump()
        return cancelled

    def read_ahead(self, keys: Sequence[int]) -> None:
        """Do nothing: pages of a mapped file are not used."""

    def close(self) -> None:
        if self._memory is not None:
            self._queue.clear()
            self._reader.close()
            super().close()
            self._free.clear()
            self._memory.release()
            self._memory = None

    def _until_read(self) -> None:
        """Hold the host until a block has been filled."""
        self._come.put(self._come.get())

    def _pump(self) -> None:
        self._collect()
        while not self._come.empty():
            copy = self._come.get()
            read = self._reads[copy]
            if read.error is None:
                self._run(copy)
            else:
                copy.finish(read.end, read.error)
            if copy.done:
                self._give_back(copy)
        super()._pump()

    def _may_start(self, copy: Transfer) -> bool:
        if copy.precision != FULL:  # lies in memory
            return super()._may_start(copy)
        return bool(self._free) or (copy.urgent and self._make_room())

    def start(self, copy: Transfer) -> None:
        """Have it read into a block; copy it from there once that is done."""
        if copy in self._reads or copy.precision != FULL:
            super().start(copy)
            return
        read = self._file.read(
            copy.key, self._free.pop(), urgent=copy.urgent, slot=copy.slot, then=lambda _read: self._come.put(copy)
        )
        self._reads[copy] = read
        self._reader.submit(read)  # type: ignore[arg-type]

    def _source(self, copy: Transfer) -> Tensor:
        read = self._reads.get(copy)
        return super()._source(copy) if read is None else read.target

    def _complete(self, copy: Transfer, start: float, end: float) -> None:
        """`start` is the copy's to the device; for whoever observes, the expert's way began with its read."""
        if copy not in self._reads:
            super()._complete(copy, start, end)
            return
        read = self._give_back(copy)  # first: whatever an observer raises, the block is free
        busy_s = self.busy_s
        super()._complete(copy, start - (read.end - read.start), end)
        self.bytes_read += read.bytes_read
        self.busy_s = busy_s + max(0.0, read.end - max(read.start, self._free_at))  # reads overlap: counted once
        self._free_at = max(self._free_at, read.end)

    def _make_room(self) -> bool:
        """Take the block of the forecast that got one last; it comes first when there is one again."""
        for copy in reversed(self._reads):
            if not copy.urgent and self._take_back(copy):
                self._queue.submit(copy, front=True)
                return True
        return False

    def _take_back(self, copy: Transfer) -> bool:
        """Whether a transfer that no thread has begun to read is without a block again."""
        read = self._reads.get(copy)
        if read is None or not self._reader.cancel(read):  # type: ignore[arg-type]
            return False
        self._give_back(copy)
        copy.started = False
        return True

    def _give_back(self, copy: Transfer) -> Read | CodedRead:
        """Its block is not used any more."""
        read = self._reads.pop(copy)
        self._free.append(read.target)
        return read
