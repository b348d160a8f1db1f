"""A link that is the disk itself: experts are read into their slots past the system's page cache, several at a time."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.links.base import Copy, Link, check_rate
from expertcast.runtime.links.kept_parts import KeptParts
from expertcast.runtime.pools.states import State
from expertcast.runtime.storage.arrival import Arrival, Reader
from expertcast.runtime.storage.coded_read import CodedRead
from expertcast.runtime.storage.coded_reader import CodedReader
from expertcast.runtime.storage.coded_store import CodedStore
from expertcast.runtime.storage.direct_reader import THREADS
from expertcast.runtime.storage.file_store import FileStore
from expertcast.runtime.storage.precision import FULL
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore


@dataclass(slots=True, eq=False)
class _DiskCopy(Copy):
    read: Arrival | None = None
    """None: the copy lay in memory."""


class DiskLink(Link):
    """Reads a disk store's file directly into the slots of a model on the CPU: no memory but the slots is used.

    Args:
        threads: reads under way at a time.
        bandwidth: bytes per second that the disk is taken for, at most; None: as it is.
        pools: bytes in which parts of coded experts are kept beside the slots, by state; None: nothing is.
        passing: with pools, slots for experts that are not to stay, as a multiple of K: 1, or 2 with forecasts.
    """

    name = "disk"
    by_address = False

    def __init__(
        self, threads: int = THREADS, *, bandwidth: float | None = None, pools: Mapping[State, int] | None = None,
        passing: int = 2,
    ) -> None:  # fmt: skip
        super().__init__()
        check_disk(threads, bandwidth)
        self._memory, self._passing = pools, passing
        self._kept: KeptParts | None = None
        self._threads, self.bandwidth = threads, bandwidth
        self._reader: Reader | None = None
        self._counting = threading.Lock()
        self._free_at = 0.0
        """When the last read that was counted ended."""

    def attach(self, store: ExpertStore, pool: SlotPool) -> None:
        """
        Raises:
            ExpertcastError: the experts do not lie in a file, or the slots not in host memory.
        """
        super().attach(store, pool)
        self._file = file_of(store)
        self._use(self._reader_of(self._file, pool))
        self._free_at = 0.0

    def _use(self, reader: Reader) -> None:
        if isinstance(reader, CodedReader):
            reader.jobs.held_back = True
        self._reader = reader

    def _reader_of(self, file: FileStore, pool: SlotPool) -> Reader:
        """A new reader that fills these slots."""
        if pool.device.type != "cpu":
            raise ExpertcastError(
                f"this link fills host memory, and the slots are on {pool.device}: give link='disk', which goes by that"
            )
        if not self._memory:
            return file.reader(self._threads, self.bandwidth)
        if not isinstance(file, CodedStore):
            raise ExpertcastError("pools keep compressed experts: give a codec that compresses, such as 'bitsplit'")
        self._kept = KeptParts(
            file, pool, self._memory, passing=self._passing, threads=self._threads, pace=self.bandwidth
        )
        self.pools = self._kept.pools
        return self._kept.reader

    def twin(self) -> Link:
        return DiskLink(self._threads, bandwidth=self.bandwidth, pools=self._memory, passing=self._passing)

    def seconds(self, key: int) -> float:
        return self.copy_s if self._kept is None else self._kept.seconds(key)

    def in_order(self, keys: Sequence[int]) -> Sequence[int]:
        return keys if self._kept is None else self._kept.in_order(keys)

    def submit(self, key: int, slot: int, *, urgent: bool, precision: str = FULL) -> Copy:
        block = self._pool.block(slot)
        if precision != FULL:  # lies in memory
            packed = self._store.copies(precision).block(key)
            block[: packed.numel()] = packed
            copy = _DiskCopy(key, slot, urgent, started=True, done=True, precision=precision)
            start = self.clock()
            with self._counting:
                self._count(copy, start, start)
            return copy
        copy = _DiskCopy(key, slot, urgent)
        if self._kept is not None:
            self._kept.fills(slot)

        def arrived(read: Arrival) -> None:
            try:
                if read.error is None:
                    with self._counting:  # reads overlap: the time in which any was under way is counted once
                        start, self._free_at = max(read.start, self._free_at), max(read.end, self._free_at)
                        self._count(copy, min(start, read.end), read.end)
                        self.bytes_read += read.bytes_read
            finally:
                copy.error, copy.done = read.error, True

        copy.read = self._file.read(key, block, arrived, urgent)
        self._open_reader.submit(copy.read)
        return copy

    def wait(self, copy: Copy) -> None:
        assert isinstance(copy, _DiskCopy)
        assert not copy.cancelled
        if self._kept is not None:
            self._kept.take_apart()
        if isinstance(copy.read, CodedRead) and isinstance(self._reader, CodedReader):
            self._reader.wait(copy.read)
        elif copy.read is not None:
            copy.read.wait()

    def promote(self, copy: Copy) -> None:
        assert isinstance(copy, _DiskCopy)
        copy.urgent = True
        if copy.read is not None:
            self._open_reader.promote(copy.read)

    def cancel(self, copy: Copy) -> bool:
        assert isinstance(copy, _DiskCopy)
        copy.cancelled = copy.read is not None and self._open_reader.cancel(copy.read)
        return copy.cancelled

    def read_ahead(self, keys: object) -> None:
        """Nothing to do: pages of the mapped file are not used."""

    def restart(self) -> None:
        if self._kept is None:
            super().restart()
        else:
            self._kept.restart()
            self._use(self._kept.reader)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    @property
    def _open_reader(self) -> Reader:
        assert self._reader is not None, "the link is closed"
        return self._reader


def file_of(store: ExpertStore) -> FileStore:
    """The store, if it is one that a disk's link can read.

    Raises:
        ExpertcastError: its experts do not lie in a file.
    """
    if not isinstance(store, FileStore):
        raise ExpertcastError("link 'disk' reads experts from a file: give store='disk'")
    return store


def check_disk(threads: int, bandwidth: float | None) -> None:
    """
    Raises:
        ExpertcastError: no threads, or no bandwidth.
    """
    if threads < 1:
        raise ExpertcastError(f"threads={threads}: give 1 or more")
    check_rate(bandwidth)
