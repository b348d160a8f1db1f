"""A disk in the virtual time of a simulated device, and the link that reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from benchmarks.timed.device import Span, TimedDevice, Work
from benchmarks.timed.links import Timed
from torch import Tensor

from expertcast.runtime.links.disk_cuda import CudaDiskLink, buffer_count
from expertcast.runtime.storage.disk_store import DiskStore
from expertcast.runtime.storage.reader import THREADS
from expertcast.runtime.storage.store import ExpertStore
from expertcast.runtime.storage.transfer import Transfer, TransferQueue


@dataclass(slots=True, eq=False, kw_only=True)
class TimedRead(Transfer):
    """Read of one expert; `start` and `end` are seconds of the device's clock."""

    target: Tensor

    @property
    def bytes_read(self) -> int:
        return self.target.numel()


class TimedDisk(TransferQueue[TimedRead]):
    """Simulates a store's file and reader for :mod:`expertcast.runtime.links.disk_cuda`.

    Up to `depth` requests run at a time, urgent ones first. Their bytes arrive one request after another; access times
    overlap. Half of a block is written when its bytes begin to arrive and all of it at their end, so an early reader
    gets a torn block.

    Args:
        device: provides the clock, and records in `races` a block that is filled too early.
        store: store whose blocks are on the disk.
        block_bytes: bytes that each expert's read stands for.
        bandwidth: bytes per second.
        access_s: seconds from a request to its first byte.
        depth: requests in flight; these can no longer be overtaken or cancelled.
    """

    compressed = False

    def __init__(
        self, device: TimedDevice, store: ExpertStore, block_bytes: int, bandwidth: float, *, access_s: float = 80e-6,
        depth: int = 2,
    ) -> None:  # fmt: skip
        super().__init__()
        self._device, self._store = device, store
        self._seconds, self._access_s, self._depth = block_bytes / bandwidth, access_s, depth
        self._size = block_bytes
        self._in_flight = 0
        self._free_at = 0.0
        """Arrival time of the last byte of all started reads."""

    # interface of a store's file

    def reader(self, threads: int, pace: float | None) -> TimedDisk:
        del threads, pace
        return self

    def read(
        self, key: int, block: Tensor, *, urgent: bool, slot: int = -1, then: Callable[[Any], None] | None = None
    ) -> TimedRead:
        return TimedRead(key, slot, urgent, target=block, then=then)

    # interface of its reader

    def submit(self, read: TimedRead, *, front: bool = False) -> None:
        super().submit(read, front=front)
        self._next()

    def close(self) -> None:
        """Wait for the reads in flight."""
        super().close()
        if self._in_flight:
            self._device.wait_until(lambda: not self._in_flight)

    def _next(self) -> None:
        device = self._device
        while self._in_flight < self._depth and (read := self.first()) is not None:
            read.begin()
            now = device.at
            self._in_flight += 1
            read.start = now
            first = max(now + self._access_s, self._free_at)
            self._free_at = first + self._seconds
            work = Work(0.0, writes=(read.target.data_ptr(),), name="read")
            device.note(work)
            device.at_time(first, lambda read=read, work=work: self._begin(read, work))  # type: ignore[misc]
            device.at_time(self._free_at, lambda read=read, work=work: self._end(read, work))  # type: ignore[misc]

    def _begin(self, read: TimedRead, work: Work) -> None:
        self._device.begin(work)
        half = read.target.numel() // 2
        read.target[half:] = 0xFF  # the previous content must not pass for the new one
        read.target[:half] = self._store.block(read.key)[:half]

    def _end(self, read: TimedRead, work: Work) -> None:
        read.target.copy_(self._store.block(read.key))
        now = work.ended = self._device.at
        assert work.begun is not None
        self._device.spans.append(Span(name="read", stream=-1, start=work.begun, end=now, size=self._size))
        self._in_flight -= 1
        read.finish(now)
        self._next()


class TimedDiskLink(Timed, CudaDiskLink):
    """:class:`CudaDiskLink` with a simulated disk.

    Args:
        timed: the simulated device.
        block_bytes: bytes that each expert stands for.
        disk: disk bandwidth in bytes per second.
        buffers: host buffers; None: the default for experts of `block_bytes`.
        options: arguments of :class:`TimedDisk`.
    """

    name = "timed disk"

    def __init__(
        self, timed: TimedDevice, block_bytes: int, disk: float, buffers: int | None = None, **options: Any
    ) -> None:
        super().__init__(timed, block_bytes, buffers=buffers or buffer_count(block_bytes, THREADS))
        self._disk, self._options = disk, options

    def _file_of(self, store: ExpertStore) -> DiskStore:
        return cast(DiskStore, TimedDisk(self.timed, store, self.stands_for, self._disk, **self._options))

    def _wait_for_read(self) -> None:
        self.timed.wait_until(lambda: not self._read_done.empty())
