"""A CUDA link that is as slow as a slower machine's: every copy is padded by copies of the same bytes.

The copy engine is busy for as long as it would be over there, so that all that waits for it waits as long; neither the
device's multiprocessors nor the host have more to do than to queue the padding.
"""

from __future__ import annotations

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.links.base import check_rate
from expertcast.runtime.links.cuda import CudaLink
from expertcast.runtime.links.driver import copy_seconds
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore

_LARGE = 64 << 20
"""Bytes of the copies that the device's own rate is measured with; the store's own size if that is less."""


class PacedCudaLink(CudaLink):
    """A copy takes latency + bytes / bandwidth; the device's own rate is measured when the link is attached.

    Args:
        bandwidth: bytes per second; none: the device's own.
        latency: seconds per copy.
        window: as for :class:`CudaLink`.
    """

    name = "paced"

    def __init__(self, bandwidth: float | None, latency: float = 0.0, window: int | None = None) -> None:
        super().__init__(window)
        check_rate(bandwidth, latency)
        self.bandwidth, self.latency = bandwidth, latency
        self.rate = 0.0
        """Bytes per second of the device's own link; known once attached."""

    def attach(self, store: ExpertStore, pool: SlotPool) -> None:
        """
        Raises:
            ExpertcastError: the device's own link is slower than `bandwidth`.
        """
        super().attach(store, pool)
        size = min(_LARGE, max(store.nbytes, store.layout.block_bytes))
        self.rate = size / copy_seconds(self._device, size)
        if self.bandwidth is not None and self.bandwidth > self.rate:
            raise ExpertcastError(
                f"bandwidth={self.bandwidth:g}: this device's link does {self.rate:.3g} bytes per second itself; give "
                "less, or leave bandwidth out"
            )

    def _transfer(self, target: int, source: int, size: int) -> None:
        seconds = self.latency + size / (self.bandwidth or self.rate)
        padding = max(0, round(seconds * self.rate) - size)
        while padding:
            part = min(padding, size)
            self._device.to_device(target, source, part, self._stream)
            padding -= part
        super()._transfer(target, source, size)
