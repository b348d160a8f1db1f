"""The link of a CUDA device: asynchronous copies from page-locked memory on a stream of their own.

Ordering, all on the device and without host synchronisation:

- a copy into a slot waits (on the copy stream) for the event recorded after the last kernels that read the slot;
- compute waits (on its stream) for the event recorded after the copy, only for slots that it reads;
- a stream runs in order, so a copy that has been issued cannot be overtaken: forecasts are issued a few at a time
  (`window`) and the rest is kept here, where urgent copies overtake them and useless ones are dropped.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.links import Copy, Link
from expertcast.runtime.slots import SlotPool
from expertcast.runtime.store import ExpertStore


@dataclass(slots=True, eq=False)
class _DeviceCopy(Copy):
    begun: torch.cuda.Event | None = None
    arrived: torch.cuda.Event | None = None


class CudaLink(Link):
    """Copies over PCIe or NVLink.

    Args:
        window: forecasts' copies that may be issued and unfinished at a time. A miss waits for these at most; too
            few leave the link idle between two calls from the model's thread.

    `busy_s` is taken from events on the copy stream and is complete after :meth:`synchronize`.
    """

    name = "cuda"

    def __init__(self, window: int = 8) -> None:
        super().__init__()
        if window < 1:
            raise ExpertcastError(f"window={window}: give 1 or more")
        self._window = window
        self._queued: deque[_DeviceCopy] = deque()
        self._issued: deque[_DeviceCopy] = deque()

    def attach(self, store: ExpertStore, pool: SlotPool) -> None:
        super().attach(store, pool)
        self._device = pool.device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        # the pool was zeroed on the stream that is current now: no copy may come before that
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._last_read: list[torch.cuda.Event | None] = [None] * pool.count

    def submit(self, key: int, slot: int, *, urgent: bool) -> Copy:
        copy = _DeviceCopy(key, slot, urgent)
        if urgent:
            self._issue(copy)
        else:
            self._queued.append(copy)
            self._pump()
        return copy

    def promote(self, copy: Copy) -> None:
        assert isinstance(copy, _DeviceCopy)
        if not copy.started:
            copy.urgent = True
            self._queued.remove(copy)
            self._issue(copy)

    def cancel(self, copy: Copy) -> bool:
        assert isinstance(copy, _DeviceCopy)
        if copy.started:
            return False
        copy.cancelled = True
        self._queued.remove(copy)
        return True

    def wait(self, copy: Copy) -> None:
        """Make the current stream wait; the host goes on."""
        assert isinstance(copy, _DeviceCopy)
        self.promote(copy)
        assert copy.arrived is not None
        torch.cuda.current_stream(self._device).wait_event(copy.arrived)
        self._pump()

    def poll(self, copy: Copy) -> bool:
        assert isinstance(copy, _DeviceCopy)
        if not copy.done and copy.arrived is not None and copy.arrived.query():  # type: ignore[no-untyped-call]
            self._finish(copy)
        return copy.done

    def mark_read(self, slots: list[int]) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        for slot in slots:
            self._last_read[slot] = event
        self._pump()

    def synchronize(self) -> None:
        """Wait on the host until every copy that was issued has arrived, and count it."""
        self._stream.synchronize()
        self._collect()

    def reset(self) -> None:
        self.synchronize()
        super().reset()

    def close(self) -> None:
        self._queued.clear()
        self.synchronize()  # the buffers of store and pool may be freed after this

    def _pump(self) -> None:
        self._collect()
        while self._queued and len(self._issued) < self._window:
            self._issue(self._queued.popleft())

    def _issue(self, copy: _DeviceCopy) -> None:
        copy.started = True
        last_read = self._last_read[copy.slot]
        copy.begun = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        copy.arrived = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            if last_read is not None:
                self._stream.wait_event(last_read)
            copy.begun.record(self._stream)
            self._pool.block(copy.slot).copy_(self._store.block(copy.key), non_blocking=True)
            copy.arrived.record(self._stream)
        self._issued.append(copy)

    def _collect(self) -> None:
        """Finish the oldest issued copies that have arrived; one stream finishes in order."""
        while self._issued:
            oldest = self._issued[0]
            assert oldest.arrived is not None
            if not oldest.arrived.query():  # type: ignore[no-untyped-call]
                return
            self._finish(oldest)

    def _finish(self, copy: _DeviceCopy) -> None:
        assert copy.begun is not None
        assert copy.arrived is not None
        copy.done = True
        self._issued.remove(copy)
        begun, end = 0.0, copy.begun.elapsed_time(copy.arrived) / 1e3
        if self.recorder is not None:
            begun, end = self.recorder.device_time(copy.begun), self.recorder.device_time(copy.arrived)
        self._count(copy, begun, end)
