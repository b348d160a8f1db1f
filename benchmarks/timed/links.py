"""The CUDA links themselves, on a device in virtual time."""

from __future__ import annotations

from typing import Any, cast

from benchmarks.timed.device import TimedDevice
from benchmarks.timed.disk import TimedDisk
from expertcast.runtime.experimental.kernel_link import BlockCopier, KernelLink, Moves
from expertcast.runtime.links.cuda import CudaLink, window_of
from expertcast.runtime.links.disk_cuda import CudaDiskLink, places_of
from expertcast.runtime.storage.disk_store import DiskStore
from expertcast.runtime.storage.reader import THREADS
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore


class TimedCudaLink(CudaLink):
    """:class:`CudaLink` with another driver under it.

    Args:
        timed: the device.
        block_bytes: bytes that each expert's copy stands for.
        window: as for the class above; None: what it would take for blocks of `block_bytes`.
    """

    name = "timed"

    def __init__(self, timed: TimedDevice, block_bytes: int, window: int | None = None) -> None:
        super().__init__(window or window_of(block_bytes))
        self.driver = self.timed = timed
        self._stands_for = block_bytes

    def attach(self, store: ExpertStore, pool: SlotPool) -> None:
        start, size = pool.block(0).data_ptr(), store.layout.block_bytes
        self.timed.scale(range(start, start + pool.count * size), self._stands_for / size)
        super().attach(store, pool)


class TimedDiskLink(CudaDiskLink):
    """:class:`CudaDiskLink` with another driver under it, and a disk in the same virtual time behind it.

    Args:
        timed: the device.
        block_bytes: bytes that each expert stands for.
        disk: bytes per second that are read.
        places: blocks of host memory on the way; None: what it would take for experts of `block_bytes`.
        options: of :class:`TimedDisk`.
    """

    name = "timed disk"

    def __init__(
        self, timed: TimedDevice, block_bytes: int, disk: float, places: int | None = None, **options: Any
    ) -> None:
        super().__init__(places=places or places_of(block_bytes, THREADS))
        self.driver = self.timed = timed
        self._stands_for, self._disk, self._options = block_bytes, disk, options

    def attach(self, store: ExpertStore, pool: SlotPool) -> None:
        start, size = pool.block(0).data_ptr(), store.layout.block_bytes
        self.timed.scale(range(start, start + pool.count * size), self._stands_for / size)
        super().attach(store, pool)

    def _file_of(self, store: ExpertStore) -> DiskStore:
        return cast(DiskStore, TimedDisk(self.timed, store, self._stands_for, self._disk, **self._options))

    def _until_read(self) -> None:
        self.timed.wait_until(lambda: not self._come.empty())


class TimedKernelLink(KernelLink):
    """:class:`KernelLink` with another driver under it: a call's copies are one kernel on the link's stream.

    Args:
        timed: the device.
        block_bytes: bytes that each expert's copy stands for.
    """

    name = "timed kernel"

    def __init__(self, timed: TimedDevice, block_bytes: int) -> None:
        super().__init__()
        self.driver = self.timed = timed
        self._stands_for = block_bytes

    def attach(self, store: ExpertStore, pool: SlotPool) -> None:
        super().attach(store, pool)
        self._copier = _TimedCopier(self._copier, self.timed, self._stands_for)


class _TimedCopier(BlockCopier):
    def __init__(self, copier: BlockCopier, timed: TimedDevice, block_bytes: int) -> None:
        self._copier, self._timed, self._block_bytes = copier, timed, block_bytes

    def copy(self, moves: Moves, *args: Any) -> None:
        self._copier.copy(moves, *args)
        seconds = int(moves.moved_N.sum()) * self._block_bytes / self._timed.bandwidth
        self._timed.launch(self._timed.costs.copy_setup_s + seconds, name="copies")
