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

from collections import deque
from collections.abc import Sequence

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

    def attach(self, store: ExpertStore, pool: SlotPool) -> None:
        super().attach(store, pool)
        assert self.driver is not None, "this link needs slots on a CUDA device"
        device = self._device = self.driver
        self._size = store.layout.block_bytes
        self.window = self._window_given or window_of(self._size)
        """Prefetches in flight below which another one is issued."""
        self._stream = device.new_stream()
        # The pool was zeroed on the current stream: no copy may run before that.
        self._last = device.current_stream()
        self._stream.wait_stream(self._last)
        self._read: dict[int, torch.cuda.Event] = {}
        """Event after the last kernels that read a slot, by slot."""

    def send(self, values: Sequence[int]) -> Sent:
        device = self._device
        sent = device.send(torch.tensor(values, dtype=torch.int64), self._stream)
        arrived = device.record(self._stream)
        return Sent(sent, lambda: device.current_stream().wait_event(arrived))

    def submit(self, key: int, slot: int, *, urgent: bool, precision: str = FULL) -> Transfer:
        if not (urgent and self.by_address and precision == FULL):
            return super().submit(key, slot, urgent=urgent, precision=precision)
        copy = Transfer(key, slot, urgent)
        self._run(copy)  # no urgent copy waits in the queue
        return copy

    def wait(self, copy: Transfer) -> None:
        """Make the current stream wait for the copy. The host does not wait."""
        if not copy.started:
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
        super()._pump()

    def _may_start(self, copy: Transfer) -> bool:
        return copy.urgent or sum(not other.urgent for other in self._issued) < self.window

    def start(self, copy: Transfer) -> None:
        """Queue the copy on the stream after all issued ones."""
        read = self._read.pop(copy.slot, None)
        if read is not None:
            self._stream.wait_event(read)
        # After another copy, its end event serves as this one's start: an extra event would take link time.
        last = self._issued[-1].arrived if self._issued else None
        copy.begun = self._record() if last is None or last.query() else last
        source = self._source(copy)
        self._device.to_device(self._pool.block(copy.slot)[: source.numel()], source, self._stream)
        copy.arrived = self._record()
        self._issued.append(copy)

    def _record(self) -> torch.cuda.Event:
        return self._device.record(self._stream, timing=True)

    def _collect(self) -> None:
        """Complete the oldest issued copies that have arrived; one stream finishes in order."""
        while self._issued and self._issued[0].arrived.query():
            copy = self._issued.popleft()
            # The clock's numbers have single precision: a short time is exact only between two events close together.
            start, seconds = 0.0, copy.begun.elapsed_time(copy.arrived) / 1e3
            try:
                start = 0.0 if self.observer is None else self.observer.device_time(copy.begun)
            except BaseException as error:  # raised by `check`
                self.failure = self.failure or error
            self._complete(copy, start, start + seconds)
