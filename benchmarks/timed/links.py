"""The CUDA link on a device in virtual time."""

from __future__ import annotations

from typing import Any

from benchmarks.timed.device import TimedDevice
from expertcast.runtime.links.base import Link
from expertcast.runtime.links.cuda import CudaLink, window_of
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore


class Timed(Link):
    """Mixin that runs a CUDA link on a simulated device. It precedes the link among the base classes.

    Args:
        timed: the simulated device.
        block_bytes: bytes that each expert's copy stands for.
        args, options: arguments of the link.
    """

    def __init__(self, timed: TimedDevice, block_bytes: int, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.driver = self.timed = timed
        self.stands_for = block_bytes

    def attach(self, store: ExpertStore, pool: SlotPool) -> None:
        start, size = pool.block(0).data_ptr(), store.layout.block_bytes
        self.timed.scale(range(start, start + pool.count * size), self.stands_for / size)
        super().attach(store, pool)


class TimedCudaLink(Timed, CudaLink):
    """:class:`CudaLink` with the default window for blocks of `block_bytes`."""

    name = "timed"

    def __init__(self, timed: TimedDevice, block_bytes: int) -> None:
        super().__init__(timed, block_bytes, window_of(block_bytes))
