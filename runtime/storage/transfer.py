"""Transfers of experts to the device, the queue of every link and reader, and small values on their way."""

from __future__ import annotations

import _thread
import heapq
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import Tensor

from expertcast.runtime.storage.layout import FULL

_ENDING = threading.Lock()
"""Guards `done` of all transfers against those who begin to wait."""


def _held() -> _thread.LockType:
    lock = _thread.allocate_lock()
    lock.acquire()
    return lock


@dataclass(slots=True, eq=False)
class Transfer:
    """One expert on its way into a slot, or bytes of a file on their way into memory.

    The queue's lock guards `urgent`, `started` and `cancelled` while it may be in a queue. `done` may be read without a
    lock: it is set once, after everything else that :meth:`finish` writes, and never cleared. So a thread that reads
    True also reads the final `error` and `end`. One that reads False may be a moment late and asks again, or waits:
    there it looks once more under the lock under which `done` is set, and leaves a lock for :meth:`finish` to release
    only if it is not set yet. No end is missed, and a transfer without a waiting thread makes no lock.
    """

    key: int = -1
    """The expert."""
    slot: int = -1
    urgent: bool = False
    """A layer that runs needs it; else a forecast requests it."""
    precision: str = FULL
    started: bool = False
    """It has begun, and cannot be cancelled any more."""
    done: bool = False
    """It has arrived, or failed with `error`."""
    cancelled: bool = False
    error: BaseException | None = None
    start: float = 0.0
    end: float = 0.0
    """Seconds of the clock between which it was under way."""
    then: Callable[[Any], None] | None = None
    """Called with this transfer when it is over, before a waiting thread goes on."""
    begun: Any = None
    arrived: Any = None
    """Events of a CUDA device around its copy; the copy before it ends at `begun`."""
    _awaited: _thread.LockType | None = field(default=None, repr=False)
    """Held until it is over, for threads that wait."""

    @property
    def waiting(self) -> bool:
        """Whether something of it is left to begin: it stays in the queue as long."""
        return not (self.started or self.cancelled)

    def begin(self) -> None:
        """It is under way, or the next part of it."""
        self.started = True

    def finish(self, end: float, error: BaseException | None = None) -> None:
        """End the transfer, arrived or failed; an exception of `then` fails it too.

        Args:
            end: seconds of the clock.
            error: raised by whoever waits.
        """
        self.end = end
        self.error = self.error or error
        try:
            if self.then is not None:
                self.then(self)
        except BaseException as raised:
            self.error = self.error or raised
        finally:
            with _ENDING:
                self.done = True
                awaited, self._awaited = self._awaited, None
            if awaited is not None:
                awaited.release()

    def wait(self) -> None:
        """Return when it is over.

        Raises:
            BaseException: whatever it failed with.
        """
        if not self.done:
            awaited = _held()
            with _ENDING:
                over = self.done
                self._awaited = awaited = self._awaited or awaited
            if not over:
                with awaited:
                    pass
        if self.error is not None:
            raise self.error


T = TypeVar("T", bound=Transfer)


class TransferQueue(Generic[T]):
    """Transfers that have not begun: urgent ones first, then forecasts, each in the order of their requests."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Guards the queue, and the state of its transfers; may be entered again by the thread that holds it."""
        self.changed = threading.Condition(self.lock)
        self._heap: list[tuple[bool, int, T]] = []
        self._order = itertools.count()
        self._closed = False

    def submit(self, transfer: T, *, front: bool = False) -> None:
        """Queue one behind (`front`: before) those that are as urgent."""
        with self.lock:
            order = next(self._order)
            heapq.heappush(self._heap, (not transfer.urgent, -order if front else order, transfer))
            self.changed.notify_all()

    def promote(self, transfer: T) -> None:
        """Move the rest of a forecast's transfer before all other forecasts."""
        with self.lock:
            if transfer.waiting and not transfer.urgent:
                transfer.urgent = True
                self.submit(transfer)

    def cancel(self, transfer: T) -> bool:
        """Drop a transfer that has not begun. True if nothing of it was or will be moved."""
        with self.lock:
            if transfer.started or transfer.cancelled:
                return False
            transfer.cancelled = True
            return True

    def wait(self, transfer: T) -> None:
        """Return when a transfer is over.

        Raises:
            BaseException: whatever it failed with.
        """
        transfer.wait()

    def first(self) -> T | None:
        """The next one, which stays in the queue as long as something of it is left; None: there is none."""
        while self._heap:
            later, _, transfer = self._heap[0]
            if later != transfer.urgent and transfer.waiting:
                return transfer
            heapq.heappop(self._heap)  # it became urgent, and was queued again
        return None

    def take(self) -> T | None:
        """Wait for the next one, and begin it; None: the queue is closed."""
        with self.lock:
            while (transfer := self.first()) is None:
                if self._closed:
                    return None
                self.changed.wait()
            transfer.begin()
            return transfer

    def clear(self) -> None:
        """Forget all."""
        with self.lock:
            self._heap.clear()

    def close(self) -> None:
        """Forget all; threads that take get None from now on."""
        with self.lock:
            self._closed = True
            self.clear()
            self.changed.notify_all()


class Sent:
    """Values on their way to the device; `wait` makes the current stream wait for them."""

    __slots__ = ("_values", "_wait")

    def __init__(self, values: Tensor, wait: Callable[[], None] | None = None) -> None:
        self._values, self._wait = values, wait

    def take(self) -> Tensor:
        """The values, for what is launched on the current stream from now on."""
        if self._wait is not None:
            self._wait()
        return self._values
