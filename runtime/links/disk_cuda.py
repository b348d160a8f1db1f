"""The disk behind a CUDA device: experts are read into a few page-locked blocks, and copied from there.

Order of one expert's way, and who waits for whom:

- the reader's threads fill a block (:mod:`expertcast.runtime.links.staging`), several experts at a time;
- the thread that runs the model notices, whenever it calls the link, and queues the copy on the copies' stream, behind
  the event of the slot's last reader, as :class:`CudaLink` does. So copies follow each other as their reads end;
- the block is free for the next read when the event behind its copy has been reached;
- who waits for an expert holds the host until it has been read, and compute's stream until it has been copied: a
  stream can wait for events of the device only. What else is read meanwhile is copied meanwhile.

Tested with real files on devices that stand in; never run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.links.base import Copy, Link
from expertcast.runtime.links.cuda import CudaLink, DeviceCopy
from expertcast.runtime.links.disk import check_disk, file_of
from expertcast.runtime.links.staging import File, StagedCopy, Staging, places_of
from expertcast.runtime.storage.direct_reader import THREADS
from expertcast.runtime.storage.host_memory import PageLock
from expertcast.runtime.storage.precision import FULL
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore


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
        copy.cancelled = not (copy.started or copy.done) and self._open_staging.cancel(copy)
        return copy.cancelled

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

    def _source(self, copy: DeviceCopy) -> tuple[int, int]:
        if isinstance(copy, StagedCopy):
            return self._open_staging.address(copy), self._size
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
