"""Link of a CUDA device: asynchronous copies from page-locked memory on a separate stream.

All ordering happens on the device, without host synchronisation:

- a copy into a slot waits (on the copy stream) for the event recorded after the last kernels that read the slot;
- compute waits (on its stream) for the event recorded after the copy, for the slots that it reads;
- a stream runs in order, so a later copy cannot overtake an issued one. The link therefore issues only a few
  prefetches at a time (`window`) and keeps the rest in its queue, where urgent copies overtake them and useless ones
  can be dropped. Prefetches are submitted layer by layer, the most probable first, so queue order is the order of need.

From page-locked memory, queueing a copy takes a few microseconds of the host. Blocks in pageable memory arrive just as
safely, but the driver first copies them into its own buffer in the calling thread, and may also wait there for the
slot's last reader. Such copies are as slow as host memory, and overlap with the device's work but not with the host's.

Kernels on the compute stream expand a packed copy, after the stream has waited for it. They count as readers of the
slot.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from functools import partial

import torch

from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.links.base import Link
from expertcast.runtime.storage.layout import FULL
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from expertcast.runtime.storage.transfer import Sent, Transfer

_WINDOW_BYTES = 16 << 20
"""Bytes in flight: about half a millisecond on PCIe 4, which is longer than the usual gap between two link calls of the
model's thread, and short enough for a miss to wait for it.
"""


def window_of(block_bytes: int) -> int:
    """Return how many copies of `block_bytes` bytes fill the default window."""
    return -(-_WINDOW_BYTES // block_bytes)


class CudaLink(Link):
    """Copies experts over PCIe or NVLink.

    Args:
        window: a prefetch is issued while fewer prefetches than this are in flight, so a miss waits for at most
            that many. Too few leave the link idle between two calls from the model's thread. None: 16 MiB worth of
            blocks.

    `busy_s` sums the times between the events around each copy. It is complete after :meth:`synchronize`.

    Raises:
        ExpertcastError: `window` is below 1.
    """

    name = "cuda"

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        if window is not None and window < 1:
            raise ExpertcastError(f"window={window} is out of range: use 1 or more")
        self._window_given = window
        self._issued: deque[Transfer] = deque()
        """Copies in flight, in their order on the stream."""
        self._marks = self._marks_waited = 0
        """Number of calls of :meth:`mark_read`, and of the latest one that a copy waited for."""
        self._number = self._waited = 0
        """Numbers of the latest copy issued, slot numbers included, and of the latest one that compute waits for."""

    def attach(self, store: ExpertStore, pool: SlotPool) -> None:
        super().attach(store, pool)
        assert self.driver is not None, "this link needs slots on a CUDA device"
        device = self._device = self.driver
        self._size = store.layout.block_bytes
        self._whole = min(self._layer_nbytes) == self._size
        """Whether every full expert fills its slot."""
        self.window = self._window_given or window_of(self._size)
        """Prefetches in flight below which another one is issued."""
        self._stream = device.new_stream()
        # The pool was zeroed on the current stream: no copy may run before that.
        self._last = device.current_stream()
        self._stream.wait_stream(self._last)
        self._read: dict[int, tuple[int, torch.cuda.Event]] = {}
        """By slot, the event after the last kernels that read it, with the number of their :meth:`mark_read`."""

    def send(self, values: Sequence[int]) -> Sent:
        device = self._device
        given = torch.frombuffer(array("q", values), dtype=torch.int64) if values else torch.empty(0, dtype=torch.int64)
        sent = device.send(given, self._stream)
        self._number += 1
        return Sent(sent, partial(self._wait_event, device.record(self._stream), self._number))

    def submit(self, key: int, slot: int, *, urgent: bool, precision: str = FULL) -> Transfer:
        if not self.by_address or precision != FULL:
            return super().submit(key, slot, urgent=urgent, precision=precision)
        copy = Transfer(key, slot, urgent)
        if not urgent and len(self._issued) >= self.window:
            self._collect()
        if urgent or (not self._queue.heap and self._may_start(copy)):  # no urgent copy waits in the queue
            self._run(copy)
        else:
            self._queue.submit(copy)
            super()._pump()
        return copy

    def wait(self, copy: Transfer) -> None:
        """Make the current stream wait for the copy. The host does not wait."""
        if not copy.started:
            self.promote(copy)
        if copy.error is not None:
            raise copy.error
        if not copy.done and copy.number > self._waited:
            self._wait_event(copy.arrived, copy.number)

    def _wait_event(self, event: torch.cuda.Event, number: int) -> None:
        """Make the current stream wait for an event after the copy of this number, unless it waits for a later one."""
        if number > self._waited:
            self._device.current_stream().wait_event(event)
            self._waited = number

    def poll(self, copy: Transfer) -> bool:
        self._pump()
        return copy.done

    def follow(self) -> None:
        self._last = self._device.follow(self._last)

    def progress(self) -> None:
        self._pump()

    def mark_read(self, slots: list[int]) -> None:
        self._marks += 1
        read = self._marks, self._device.record(self._device.current_stream())
        self._read.update(dict.fromkeys(slots, read))
        self._pump()

    def synchronize(self) -> None:
        """Block the host until every issued copy has arrived, and count these copies."""
        self._stream.synchronize()
        self._collect()

    def reset(self) -> None:
        self.synchronize()
        super().reset()

    def close(self) -> None:
        super().close()
        self._device.synchronize()  # the caller may free the buffers of store and pool now
        self._collect()

    def _pump(self) -> None:
        self._collect()
        if self._queue.heap:
            super()._pump()

    def _may_start(self, copy: Transfer) -> bool:
        issued, window = self._issued, self.window
        return copy.urgent or len(issued) < window or sum(not other.urgent for other in issued) < window

    def start(self, copy: Transfer) -> None:
        """Queue the copy on the stream after all issued ones."""
        device, stream, issued = self._device, self._stream, self._issued
        last, read = issued[-1].arrived if issued else None, self._read.pop(copy.slot, None)
        if read is not None and read[0] > self._marks_waited:  # compute reads in order
            stream.wait_event(read[1])
            self._marks_waited, last = read[0], None
        # Right after another copy, its end event serves as this one's start: an extra event would take link time.
        copy.begun = device.record(stream, timing=True) if last is None or last.query() else last
        source, target = self._source(copy), self._pool.block(copy.slot)
        if not self._whole or copy.precision != FULL:
            target = target[: source.numel()]
        device.to_device(target, source, stream)
        copy.arrived = device.record(stream, timing=True)
        copy.number = self._number = self._number + 1
        issued.append(copy)

    def _complete(self, copy: Transfer, start: float, end: float) -> None:
        """Finish a transfer that has arrived. Streams wait for it by its event, and no thread does."""
        self._count(copy, start, end)
        copy.start, copy.end, copy.done = start, end, True

    def _collect(self) -> None:
        """Complete the oldest issued copies that have arrived; one stream finishes in order."""
        issued, awaited = self._issued, False
        while issued and issued[0].arrived.query():
            copy = issued.popleft()
            awaited |= copy.number <= self._waited
            # The clock's numbers have single precision: a short time is exact only between two events close together.
            start, seconds = 0.0, copy.begun.elapsed_time(copy.arrived) / 1e3
            try:
                start = 0.0 if self.observer is None else self.observer.device_time(copy.begun)
            except BaseException as error:  # raised by `check`
                self.failure = self.failure or error
            self._complete(copy, start, start + seconds)
        if awaited:
            self.awaited_until_s = self.clock()
