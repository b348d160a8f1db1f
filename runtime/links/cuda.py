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
from dataclasses import dataclass

import torch
from torch import Tensor

from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.links.base import Copy, QueuedLink, check_rate
from expertcast.runtime.links.driver import CudaDevice, EventPool, ForwardOrder, Sent, Upload, copy_seconds
from expertcast.runtime.storage.layout import FULL
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore

_WINDOW_BYTES = 16 << 20
"""Half a millisecond of PCIe 4: longer than the model's thread stays away, shorter than a miss can wait for."""
_READS = 64
"""Reads whose events may be outstanding before their end is looked for: runs that miss nothing never ask."""


def window_of(block_bytes: int) -> int:
    """Copies of so many bytes that a window holds."""
    return -(-_WINDOW_BYTES // block_bytes)


@dataclass(slots=True, eq=False)
class DeviceCopy(Copy):
    """One expert on its way over the device's own link."""

    begun: torch.cuda.Event | None = None
    """When it began; the arrival of the copy before it, if that was under way when this one was issued."""
    arrived: torch.cuda.Event | None = None
    chained: bool = False
    """Whether `begun` is another copy's arrival."""
    forecast: bool = False
    """Whether it counts for the window."""


class CudaLink(QueuedLink):
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
        self._issued: deque[DeviceCopy] = deque()

    def attach(self, store: ExpertStore, pool: SlotPool) -> None:
        super().attach(store, pool)
        self._size = store.layout.block_bytes
        self._window = self._window_given or window_of(self._size)
        assert self.driver is not None, "this link is for slots on a CUDA device"
        self._open(self.driver, pool.count)

    @property
    def window(self) -> int:
        """Forecasts' copies under way below which another is issued; known once attached."""
        return self._window

    def _open(self, device: CudaDevice, slots: int) -> None:
        self._device = device
        self._stream = device.new_stream()
        # the pool was zeroed on the stream that is current now: no copy may come before that
        self._stream.wait_stream(device.current_stream())
        self._order = ForwardOrder(device)
        self._upload = Upload(device, self._stream)
        self._timed, self._untimed = EventPool(device, timing=True), EventPool(device)
        self._forecasts = 0
        """Copies under way that no layer had asked for when they were issued."""
        self._tick = 0
        self._last_read = [0] * slots
        """Tick of the last kernels that read a slot."""
        self._reads: dict[int, torch.cuda.Event] = {}
        """Event of each tick that is not known to have passed, oldest first."""

    def submit(self, key: int, slot: int, *, urgent: bool, precision: str = FULL) -> Copy:
        return self._enqueue(DeviceCopy(key, slot, urgent, precision=precision))

    def send(self, values: Sequence[int]) -> Sent:
        return self._upload.send(values)

    def wait(self, copy: Copy) -> None:
        """Make the current stream wait; the host goes on."""
        assert isinstance(copy, DeviceCopy)
        self.promote(copy)
        if copy.error is not None:
            raise copy.error
        if not copy.done:
            assert copy.arrived is not None
            self._device.current_stream().wait_event(copy.arrived)

    def poll(self, copy: Copy) -> bool:
        if not copy.done:
            self._collect()
        return copy.done

    def follow(self) -> None:
        self._order.enter()

    def progress(self) -> None:
        self._pump()

    def mark_read(self, slots: list[int]) -> None:
        self._tick += 1
        event = self._reads[self._tick] = self._untimed.take()
        event.record(self._device.current_stream())
        for slot in slots:
            self._last_read[slot] = self._tick
        if len(self._reads) > _READS:
            self._forget_reads(self._tick)
        self._pump()

    def synchronize(self) -> None:
        """Wait on the host until every copy that was issued has arrived, and count it."""
        self._stream.synchronize()
        self._collect()

    def reset(self) -> None:
        self.synchronize()
        super().reset()

    def close(self) -> None:
        self._queue.clear()
        self._device.synchronize()  # the buffers of store and pool may be freed after this
        self._collect()

    def _pump(self) -> None:
        self._collect()
        while (copy := self._queue.first()) is not None and (copy.urgent or self._forecasts < self._window):
            self._issue(copy)

    def _issue(self, copy: Copy) -> None:
        """Start the copy behind all that have been started."""
        assert isinstance(copy, DeviceCopy)
        copy.started = True
        arrived = self._timed.take()
        try:
            self._wait_for_reader(copy.slot)
            copy.begun = self._begun(copy)
            source = self._source(copy)
            self._transfer(self._pool.block(copy.slot)[: len(source)], source)
            arrived.record(self._stream)
        except Exception as error:  # whoever waits for this copy gets it, and nobody else
            copy.error, copy.done = error, True
            if copy.begun is not None and not copy.chained:
                self._timed.give(copy.begun)
            self._timed.give(arrived)
            copy.begun = None
            return
        copy.arrived = arrived
        copy.forecast = not copy.urgent
        self._forecasts += copy.forecast
        self._issued.append(copy)

    def _transfer(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy of bytes from the host to the device."""
        self._device.to_device(target, source, self._stream)

    def _begun(self, copy: DeviceCopy) -> torch.cuda.Event:
        """The event at which a copy begins; behind another one it needs none of its own, which takes link time."""
        last = self._issued[-1].arrived if self._issued else None
        if last is not None and not last.query():  # type: ignore[no-untyped-call]
            copy.chained = True
            return last
        begun = self._timed.take()
        begun.record(self._stream)
        return begun

    def _source(self, copy: DeviceCopy) -> Tensor:
        """What is copied, uint8 [bytes]."""
        if copy.precision != FULL:
            return self._store.copies(copy.precision).block(copy.key)
        return self._store.block(copy.key)

    def _wait_for_reader(self, slot: int) -> None:
        tick = self._last_read[slot]
        self._forget_reads(tick)
        event = self._reads.get(tick)
        if event is not None:
            self._stream.wait_event(event)

    def _forget_reads(self, last: int) -> None:
        """Give back the events of reads that are over, the oldest first, up to the tick `last`."""
        while self._reads:
            oldest = next(iter(self._reads))
            if oldest > last or not self._reads[oldest].query():  # type: ignore[no-untyped-call]
                return
            self._untimed.give(self._reads.pop(oldest))

    def _collect(self) -> None:
        """Finish the oldest issued copies that have arrived; one stream finishes in order."""
        while self._issued:
            oldest = self._issued[0]
            assert oldest.arrived is not None
            if not oldest.arrived.query():  # type: ignore[no-untyped-call]
                return
            self._finish(self._issued.popleft())

    def _finish(self, copy: DeviceCopy) -> None:
        begun, arrived = copy.begun, copy.arrived
        assert begun is not None
        assert arrived is not None
        copy.done = True
        self._forecasts -= copy.forecast
        copy.begun = copy.arrived = None
        self._timed.give(begun)
        if not (self._issued and self._issued[0].chained):
            self._timed.give(arrived)
        # the clock's numbers are single precision: a short time is exact only between two events close together
        start = self.observer.device_time(begun)
        self._count(copy, start, start + begun.elapsed_time(arrived) / 1e3)


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
