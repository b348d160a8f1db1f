"""Transfers of experts to the device, the queue that links and readers share, and copies of small values."""

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
"""Guards `done` and `_awaited` of all transfers, so that a thread that begins to wait misses no end."""


@dataclass(eq=False)
class Transfer:
    """Copy of one expert into a slot, or of bytes of a file into memory.

    The queue's lock guards `urgent`, `started` and `cancelled` while the transfer may be in a queue. `done` may be read
    without a lock: :meth:`finish` sets it last, and it is never cleared, so a thread that reads True also reads the
    final `error` and `end`. A thread that reads False polls again or calls :meth:`wait`, which checks `done` once more
    under `_ENDING`. Only if it is still False does the thread wait on a lock that :meth:`finish` releases. So no end
    is missed, and a transfer that no thread waits for allocates no lock.

    Fields that are no arguments are the class's until they are set: a transfer is made for each expert that is missing.
    """

    key: int = -1
    """Key of the expert."""
    slot: int = -1
    urgent: bool = False
    """Whether the running layer needs it; False: a forecast requested it."""
    precision: str = FULL
    then: Callable[[Any], None] | None = None
    """Called with this transfer when it is over, before waiting threads continue."""
    started: bool = field(default=False, init=False)
    """Whether it has begun, so that it can no longer be cancelled."""
    done: bool = field(default=False, init=False)
    """Whether it has arrived, or failed with `error`."""
    cancelled: bool = field(default=False, init=False)
    error: BaseException | None = field(default=None, init=False)
    start: float = field(default=0.0, init=False)
    end: float = field(default=0.0, init=False)
    """Clock times in seconds at which the copy began and ended."""
    begun: Any = field(default=None, init=False)
    arrived: Any = field(default=None, init=False)
    """CUDA events before and after its copy. `begun` is the previous copy's `arrived` if that still runs."""
    number: int = field(default=0, init=False)
    """Its place among a CUDA link's copies."""
    _awaited: _thread.LockType | None = field(default=None, init=False, repr=False)
    """Lock that waiting threads acquire; held until the transfer is over."""

    @property
    def waiting(self) -> bool:
        """Whether a part of it has not begun; until then it stays in the queue."""
        return not (self.started or self.cancelled)

    def begin(self) -> None:
        """Mark the transfer, or its next part, as started."""
        self.started = True

    def finish(self, end: float, error: BaseException | None = None) -> None:
        """End the transfer, as arrived or failed. An exception raised by `then` also fails it.

        Args:
            end: clock time in seconds.
            error: raised in the threads that wait for it.
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
        """Block until the transfer is over.

        Raises:
            BaseException: the error that the transfer failed with.
        """
        if not self.done:
            awaited = _thread.allocate_lock()
            awaited.acquire()
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
        """Guards the queue and the state of its transfers; reentrant."""
        self.changed = threading.Condition(self.lock)
        self.heap: list[tuple[bool, int, T]] = []
        """Entries, first to last as a heap. Transfers that have begun or were cancelled stay until they come first."""
        self._order = itertools.count()
        self._closed = False

    def submit(self, transfer: T, *, front: bool = False) -> None:
        """Queue a transfer behind those of the same urgency, or with `front` before them."""
        with self.lock:
            order = next(self._order)
            heapq.heappush(self.heap, (not transfer.urgent, -order if front else order, transfer))
            self.changed.notify_all()

    def promote(self, transfer: T) -> None:
        """Make a forecast's transfer urgent: it is queued behind the urgent ones, before all forecasts."""
        with self.lock:
            if transfer.waiting and not transfer.urgent:
                transfer.urgent = True
                self.submit(transfer)

    def cancel(self, transfer: T) -> bool:
        """Cancel a transfer that has not begun. False if it has begun or was already cancelled."""
        with self.lock:
            if transfer.started or transfer.cancelled:
                return False
            transfer.cancelled = True
            return True

    def wait(self, transfer: T) -> None:
        """Block until a transfer is over.

        Raises:
            BaseException: the error that the transfer failed with.
        """
        transfer.wait()

    def first(self) -> T | None:
        """Return the next transfer, which stays in the queue while a part of it has not begun; None if empty."""
        while self.heap:
            later, _, transfer = self.heap[0]
            if later != transfer.urgent and transfer.waiting:
                return transfer
            heapq.heappop(self.heap)  # begun or cancelled, or queued again as urgent
        return None

    def take(self) -> T | None:
        """Wait for the next transfer and begin it; None if the queue is closed."""
        with self.lock:
            while (transfer := self.first()) is None:
                if self._closed:
                    return None
                self.changed.wait()
            transfer.begin()
            return transfer

    def clear(self) -> None:
        """Remove all transfers from the queue."""
        with self.lock:
            self.heap.clear()

    def close(self) -> None:
        """Empty the queue; from now on :meth:`take` returns None."""
        with self.lock:
            self._closed = True
            self.clear()
            self.changed.notify_all()


class Sent:
    """Values being copied to the device; `wait` makes the current stream wait for the copy."""

    __slots__ = ("_values", "_wait")

    def __init__(self, values: Tensor, wait: Callable[[], None] | None = None) -> None:
        self._values, self._wait = values, wait

    def take(self) -> Tensor:
        """Return the values, valid for work launched on the current stream from now on."""
        if self._wait is not None:
            self._wait()
        return self._values
