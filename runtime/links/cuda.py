"""The link of a CUDA device: asynchronous copies from page-locked memory on a stream of their own.

Ordering, all on the device and without host synchronisation:

- a copy into a slot waits (on the copy stream) for the event recorded after the last kernels that read the slot;
- compute waits (on its stream) for the event recorded after the copy, only for slots that it reads;
- a stream runs in order, so a copy that has been issued cannot be overtaken: forecasts are issued a few at a time
  (`window`) and the rest is kept here, where urgent copies overtake them and useless ones are dropped. Forecasts
  are asked for layer by layer, the surest first: their order here is the order in which they are needed.

From page-locked memory a copy costs the host a few microseconds. Blocks in pageable memory arrive just as safely, but
the driver then copies them into a buffer of its own first, in the calling thread, which may also wait for the slot's
last reader: such copies are as slow as the host's memory and overlap with what the device does, not with the host.

A packed copy is expanded by kernels of compute's stream, after it has waited for the copy; they count as readers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.links.base import Link, check_rate
from expertcast.runtime.links.driver import copy_seconds
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from expertcast.runtime.storage.transfer import Sent, Transfer

_WINDOW_BYTES = 16 << 20
"""Half a millisecond of PCIe 4: longer than the model's thread stays away, shorter than a miss can wait for."""


def window_of(block_bytes: int) -> int:
    """Copies of so many bytes that a window holds."""
    return -(-_WINDOW_BYTES // block_bytes)


class CudaLink(Link):
    """Copies over PCIe or NVLink.

    Args:
        window: forecasts are issued while fewer of their copies than this are under way. A miss waits for these at
            most; too few leave the link idle between two calls from the model's thread. None: 16 MiB worth of blocks.

    `busy_s` is the time between events around each copy, and is complete after :meth:`synchronize`.
    """

    name = "cuda"

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        if window is not None and window < 1:
            raise ExpertcastError(f"window={window}: give 1 or more")
        self._window_given = window
        self._issued: deque[Transfer] = deque()
        """Copies under way, in their order on the stream."""

    def attach(self, store: ExpertStore, pool: SlotPool) -> None:
        super().attach(store, pool)
        assert self.driver is not None, "this link is for slots on a CUDA device"
        device = self._device = self.driver
        self._size = store.layout.block_bytes
        self._window = self._window_given or window_of(self._size)
        self._stream = device.new_stream()
        # the pool was zeroed on the stream that is current now: no copy may come before that
        self._last = device.current_stream()
        self._stream.wait_stream(self._last)
        self._read: dict[int, torch.cuda.Event] = {}
        """Behind the last kernels that read a slot."""

    @property
    def window(self) -> int:
        """Forecasts' copies under way below which another is issued; known once attached."""
        return self._window

    def send(self, values: Sequence[int]) -> Sent:
        device = self._device
        sent = device.send(torch.tensor(values, dtype=torch.int64), self._stream)
        arrived = device.record(self._stream)
        return Sent(sent, lambda: device.current_stream().wait_event(arrived))

    def wait(self, copy: Transfer) -> None:
        """Make the current stream wait; the host goes on."""
        self.promote(copy)
        if copy.error is not None:
            raise copy.error
        if not copy.done:
            self._device.current_stream().wait_event(copy.arrived)

    def poll(self, copy: Transfer) -> bool:
        self._pump()
        return copy.done

    def follow(self) -> None:
        self._last = self._device.follow(self._last)

    def progress(self) -> None:
        self._pump()

    def mark_read(self, slots: list[int]) -> None:
        event = self._device.record(self._device.current_stream())
        self._read.update(dict.fromkeys(slots, event))
        self._pump()

    def synchronize(self) -> None:
        """Wait on the host until every copy that was issued has arrived, and count it."""
        self._stream.synchronize()
        self._collect()

    def reset(self) -> None:
        self.synchronize()
        super().reset()

    def close(self) -> None:
        super().close()
        self._device.synchronize()  # the buffers of store and pool may be freed after this
        self._collect()

    def _pump(self) -> None:
        self._collect()
        super()._pump()

    def _may_start(self, copy: Transfer) -> bool:
        return copy.urgent or sum(not other.urgent for other in self._issued) < self._window

    def start(self, copy: Transfer) -> None:
        """Issue the copy behind all that have been issued."""
        read = self._read.pop(copy.slot, None)
        if read is not None:
            self._stream.wait_event(read)
        # behind another copy it needs no event of its own, which takes link time
        last = self._issued[-1].arrived if self._issued else None
        copy.begun = self._record() if last is None or last.query() else last
        source = self._source(copy)
        self._transfer(self._pool.block(copy.slot)[: len(source)], source)
        copy.arrived = self._record()
        self._issued.append(copy)

    def _record(self) -> torch.cuda.Event:
        return self._device.record(self._stream, timing=True)

    def _transfer(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy of bytes from the host to the device."""
        self._device.to_device(target, source, self._stream)

    def _collect(self) -> None:
        """Complete the oldest issued copies that have arrived; one stream finishes in order."""
        while self._issued and self._issued[0].arrived.query():
            copy = self._issued.popleft()
            # the clock's numbers are single precision: a short time is exact only between two events close together
            start = self.observer.device_time(copy.begun)
            self._complete(copy, start, start + copy.begun.elapsed_time(copy.arrived) / 1e3)


# A slower link on this device: each copy is padded by copies of the same bytes, which keep the copy engine busy.

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

    def _transfer(self, target: Tensor, source: Tensor) -> None:
        size = len(source)
        seconds = self.latency + size / (self.bandwidth or self.rate)
        padding = max(0, round(seconds * self.rate) - size)
        while padding:
            part = min(padding, size)
            self._device.to_device(target[:part], source[:part], self._stream)
            padding -= part
        super()._transfer(target, source)
