"""Disk link for CUDA: reads experts into page-locked buffers, and copies them from there to the device.

A transfer of an expert is a read, then a copy:

- the reader's threads fill a buffer, several experts at a time;
- at its next call of the link, the thread that runs the model queues the copy on the link's stream, after the event of
  the slot's last reader, as :class:`CudaLink` does. So copies are issued in the order in which reads end;
- the buffer is free for the next read when the copy's end event has occurred. Transfers without a buffer stay in the
  link's queue, where they can be cancelled. An urgent one takes the buffer of the latest forecast whose read has not
  begun;
- a wait for an expert blocks the host until it has been read, since a stream can wait for events of the device only,
  and then the compute stream until it has been copied. Other experts are read and copied meanwhile.

Tested with real files on simulated devices; never run on a GPU.
"""

from __future__ import annotations

from queue import SimpleQueue

from torch import Tensor

from expertcast.data.machine import usable_processors
from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.links.base import Link
from expertcast.runtime.links.cuda import CudaLink
from expertcast.runtime.links.disk import check_disk, file_of
from expertcast.runtime.storage.coded_reader import CodedRead
from expertcast.runtime.storage.disk_store import DiskStore
from expertcast.runtime.storage.layout import FULL, sectors
from expertcast.runtime.storage.memory import Driver, HostMemory, PageLock
from expertcast.runtime.storage.reader import PIECE, THREADS, Read
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from expertcast.runtime.storage.transfer import Transfer

_FEWEST, _MOST = 4, 32
"""Minimum and maximum number of buffers, by default."""
_DECODED, _COPIED = 4, 2
"""Maximum number of buffers in decoding, and number in copies to the device, while the reader fills others."""


def buffer_count(block_bytes: int, threads: int, *, coded: bool = False) -> int:
    """Return the number of buffers for `threads` concurrent requests while others are decoded or copied."""
    decoded = min(_DECODED, usable_processors() // 2) if coded else 0
    return min(_MOST, max(_FEWEST + decoded, -(-threads * PIECE // block_bytes) + _COPIED))


class CudaDiskLink(CudaLink):
    """Reads a disk store's file, raw or coded, past the page cache into the slots of a model on CUDA.

    Args:
        threads: number of concurrent requests of the disk.
        bandwidth: limit of the disk's rate in bytes per second; None: no limit.
        buffers: number of page-locked buffers of one block each. They are the link's memory beside the slots, and
            `memory=` does not include them. None: enough to keep the disk busy, 4 to 32 (4 for experts of 4 MiB or
            more, up to 8 if they are coded).

    `busy_s` is the time in which any read was under way. Copies to the device are assumed to overlap with reads.
    """

    name = "disk"
    by_address = False

    def __init__(self, threads: int = THREADS, *, bandwidth: float | None = None, buffers: int | None = None) -> None:
        super().__init__()
        check_disk(threads, bandwidth)
        if buffers is not None and buffers < 1:
            raise ExpertcastError(f"buffers={buffers}: give 1 or more")
        self._threads, self.bandwidth, self._buffers_given = threads, bandwidth, buffers
        self._memory: HostMemory | None = None

    def attach(self, store: ExpertStore, pool: SlotPool) -> None:
        """
        Raises:
            ExpertcastError: the store has no readable file, or the system has no memory for the buffers.
        """
        self._file = self._file_of(store)
        super().attach(store, pool)
        count = self._buffers_given or buffer_count(self._size, self._threads, coded=self._file.compressed)
        buffer_bytes = sectors(self._size)
        lock = PageLock(driver=Driver(pool.device)) if pool.device.type == "cuda" else None
        memory = HostMemory(count * buffer_bytes, lock)
        self._free = [memory.bytes[number * buffer_bytes :][: self._size] for number in range(count)]
        self._reads: dict[Transfer, Read | CodedRead] = {}
        """Read of each transfer that has a buffer, in the order of allocation."""
        self._read_done: SimpleQueue[Transfer] = SimpleQueue()
        """Transfers whose read has ended and whose copy has not been issued; the reader's threads add them."""
        self._free_at = 0.0
        """End of the latest read counted in `busy_s`, in seconds of the clock."""
        self._reader = self._file.reader(self._threads, self.bandwidth)
        self._memory = memory

    def _file_of(self, store: ExpertStore) -> DiskStore:
        return file_of(store)

    def unattached_copy(self) -> Link:
        return CudaDiskLink(self._threads, bandwidth=self.bandwidth, buffers=self._buffers_given)

    def wait(self, copy: Transfer) -> None:
        """Block the host until the expert has been read, then make the current stream wait for its copy."""
        self.promote(copy)
        while copy.arrived is None and not copy.done:
            if not copy.started and self._issued:  # without a buffer: one is free when the oldest copy ends
                self._issued[0].arrived.synchronize()
            else:
                self._wait_for_read()
            self._pump()
        super().wait(copy)

    def promote(self, copy: Transfer) -> None:
        read = self._reads.get(copy)
        if read is not None and copy.arrived is None:
            copy.urgent = True
            self._reader.promote(read)  # type: ignore[arg-type]  # of the reader's own kind
        super().promote(copy)

    def cancel(self, copy: Transfer) -> bool:
        """Cancel a transfer whose read has not begun. Return True if no byte was or will be read."""
        self._revoke_buffer(copy)
        cancelled = super().cancel(copy)
        self._pump()
        return cancelled

    def close(self) -> None:
        if self._memory is not None:
            self._queue.clear()
            self._reader.close()
            super().close()
            self._free.clear()
            self._memory.release()
            self._memory = None

    def _wait_for_read(self) -> None:
        """Block the host until a buffer has been filled."""
        self._read_done.put(self._read_done.get())

    def _pump(self) -> None:
        self._collect()
        while not self._read_done.empty():
            copy = self._read_done.get()
            read = self._reads[copy]
            if read.error is None:
                self._run(copy)
            else:
                copy.finish(read.end, read.error)
            if copy.done:
                self._free_buffer(copy)
        super()._pump()

    def _may_start(self, copy: Transfer) -> bool:
        if copy.precision != FULL:  # packed copies are in memory
            return super()._may_start(copy)
        return bool(self._free) or (copy.urgent and self._make_room())

    def start(self, copy: Transfer) -> None:
        """Start the read into a buffer; called again for the copy when the read has ended."""
        if copy in self._reads or copy.precision != FULL:
            super().start(copy)
            return
        read = self._file.read(
            copy.key, self._free.pop(), urgent=copy.urgent, slot=copy.slot, then=lambda _read: self._read_done.put(copy)
        )
        self._reads[copy] = read
        self._reader.submit(read)  # type: ignore[arg-type]

    def _source(self, copy: Transfer) -> Tensor:
        read = self._reads.get(copy)
        return super()._source(copy) if read is None else read.target

    def _complete(self, copy: Transfer, start: float, end: float) -> None:
        """Finish a transfer. The observer receives a start that is earlier by the read's duration than the copy's."""
        if copy not in self._reads:
            super()._complete(copy, start, end)
            return
        read = self._free_buffer(copy)  # first, so that an observer's exception does not leak the buffer
        busy_s = self.busy_s
        super()._complete(copy, start - (read.end - read.start), end)
        self.bytes_read += read.bytes_read
        self.busy_s = busy_s + max(0.0, read.end - max(read.start, self._free_at))  # overlapping reads count once
        self._free_at = max(self._free_at, read.end)

    def _make_room(self) -> bool:
        """Free the buffer of the latest forecast whose read has not begun, and queue it before other forecasts."""
        for copy in reversed(self._reads):
            if not copy.urgent and self._revoke_buffer(copy):
                self._queue.submit(copy, front=True)
                return True
        return False

    def _revoke_buffer(self, copy: Transfer) -> bool:
        """Take a transfer's buffer back. Returns False if it has none or its read has begun."""
        read = self._reads.get(copy)
        if read is None or not self._reader.cancel(read):  # type: ignore[arg-type]
            return False
        self._free_buffer(copy)
        copy.started = False
        return True

    def _free_buffer(self, copy: Transfer) -> Read | CodedRead:
        """Return a transfer's buffer to the free ones, and return its read."""
        read = self._reads.pop(copy)
        self._free.append(read.target)
        return read
