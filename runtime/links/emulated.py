"""A link of set bandwidth and latency on any machine: a thread really copies, then waits out the rest.

Compute and copies overlap for real. What is emulated is the time one copy takes, latency + bytes / bandwidth,
one copy after another.
"""

from __future__ import annotations

import _thread
import ctypes
import heapq
import random
import sys
import threading
import time
from dataclasses import dataclass, field

from expertcast.runtime.links.base import Copy, Link, check_rate
from expertcast.runtime.storage.layout import FULL
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore

_SPIN_S = 60e-6
_NEGLIGIBLE_S = 5e-6
_PR_SET_TIMERSLACK = 29
_SMALL_COPY = 1 << 16
"""Bytes that move in less time than another thread takes to hand the interpreter's lock back."""

_memmove_locked = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


@dataclass(slots=True, eq=False)
class _QueuedCopy(Copy):
    arrived: _thread.LockType = field(default_factory=_thread.allocate_lock)
    """Held until the copy has arrived: cheaper than a threading.Event."""
    submitted: float = field(default_factory=time.perf_counter)


class EmulatedLink(Link):
    """A link with `bandwidth` bytes per second and `latency` seconds per copy.

    Args:
        bandwidth: bytes per second.
        latency: seconds per copy.
        jitter: up to this many extra seconds per copy, at random: for tests of the order of events.
        seed: of these.
    """

    name = "emulated"

    def __init__(self, bandwidth: float, latency: float = 0.0, *, jitter: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        check_rate(bandwidth, latency)
        self.bandwidth = bandwidth
        self.latency = latency
        self._jitter = jitter
        self._random = random.Random(seed)
        self._queue: list[tuple[int, int, _QueuedCopy]] = []
        self._order = 0
        self._changed = threading.Condition()
        self._closed = False
        self._awaited = False
        """Compute is blocked on a copy: only then the thread may hold the interpreter to be on time."""
        self._thread: threading.Thread | None = None

    def attach(self, store: ExpertStore, pool: SlotPool) -> None:
        super().attach(store, pool)
        self._mover = HostMover(store, pool)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="expertcast-link", daemon=True)
        self._thread.start()

    def submit(self, key: int, slot: int, *, urgent: bool, precision: str = FULL) -> Copy:
        copy = _QueuedCopy(key, slot, urgent)
        if precision != FULL:
            self._store.copies(precision)
            copy.precision = precision
        copy.arrived.acquire()
        self._push(copy)
        return copy

    @property
    def copy_s(self) -> float:
        return self.latency + self._store.layout.block_bytes / self.bandwidth

    def twin(self) -> Link:
        return EmulatedLink(self.bandwidth, self.latency)

    def _push(self, copy: _QueuedCopy) -> None:
        with self._changed:
            self._order += 1
            heapq.heappush(self._queue, (0 if copy.urgent else 1, self._order, copy))
            self._changed.notify()

    def wait(self, copy: Copy) -> None:
        assert isinstance(copy, _QueuedCopy)
        assert not copy.cancelled
        if not copy.done:
            self._awaited = True
            with copy.arrived:
                self._awaited = False
        if copy.error is not None:
            raise copy.error

    def promote(self, copy: Copy) -> None:
        assert isinstance(copy, _QueuedCopy)
        if not copy.started and not copy.urgent:
            copy.urgent = True
            self._push(copy)  # the old entry is skipped: the copy has started by then

    def cancel(self, copy: Copy) -> bool:
        with self._changed:
            if copy.started:
                return False
            copy.cancelled = True
            return True

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        _fine_timer()
        free_at = 0.0
        while (copy := self._next()) is not None:
            try:
                # from the moment it was due, not from when this thread woke up: a late wake-up costs no bandwidth
                start = max(copy.submitted, free_at)
                free_at = start + self._duration(copy)
                self._transfer(copy, free_at)
                self._count(copy, start, free_at)
            except BaseException as error:  # handed to the thread that waits for it
                copy.error = error
            finally:
                copy.done = True
                copy.arrived.release()

    def _transfer(self, copy: _QueuedCopy, end: float) -> None:
        """Half of the block at once, half at the end: whoever computes without waiting finds a torn block."""
        half = self.block_bytes(copy.precision) // 2
        begun = time.perf_counter()
        self._mover.move(copy.key, copy.slot, 0, half, copy.precision)
        self._sleep_until(end - (time.perf_counter() - begun))
        self._mover.move(copy.key, copy.slot, half, None, copy.precision)
        if end - time.perf_counter() > _NEGLIGIBLE_S:
            self._sleep_until(end)

    def _next(self) -> _QueuedCopy | None:
        with self._changed:
            while True:
                while self._queue:
                    _, _, copy = heapq.heappop(self._queue)
                    if not copy.started and not copy.cancelled:
                        copy.started = True
                        return copy
                if self._closed:
                    return None
                self._changed.wait()

    def _sleep_until(self, deadline: float) -> None:
        """Sleep; while compute is blocked, yield in a short loop at the end: late by 10 us instead of 60 and more."""
        while (left := deadline - time.perf_counter()) > 0:
            if left > 2 * _SPIN_S:
                time.sleep(left - _SPIN_S)
            else:
                time.sleep(0 if self._awaited else left)

    def _duration(self, copy: Copy) -> float:
        extra = self._random.random() * self._jitter if self._jitter else 0.0
        return self.latency + self.block_bytes(copy.precision) / self.bandwidth + extra


def _fine_timer() -> None:
    """Ask Linux to wake this thread within a microsecond of the deadline; elsewhere nothing is changed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


class HostMover:
    """memmove between two tensors in host memory, with the interpreter's lock released unless the copy is small.

    `Tensor.copy_` would start a second team of OpenMP threads in the copying thread and take cores from compute.
    """

    def __init__(self, store: ExpertStore, pool: SlotPool) -> None:
        self._store = store
        self._size = store.layout.block_bytes
        self._experts = store.experts
        self._sources = [store.block(layer * store.experts).data_ptr() for layer in range(store.layers)]
        self._target = pool.block(0).data_ptr()

    def move(self, key: int, slot: int, start: int = 0, end: int | None = None, precision: str = FULL) -> None:
        """Copy bytes of a block to the same place in its slot.

        Args:
            key: the expert.
            slot: where its block goes.
            start: of the bytes within the block.
            end: behind the last of them; None: all that follow.
            precision: of the block that is copied.
        """
        if precision == FULL:
            size = self._size
            layer, expert = divmod(key, self._experts)
            source = self._sources[layer] + expert * size
        else:
            packed = self._store.copies(precision)
            size = packed.block_bytes
            source = packed.address + key * size
        target = self._target + slot * self._size
        count = (size if end is None else end) - start
        (_memmove_locked if count <= _SMALL_COPY else ctypes.memmove)(target + start, source + start, count)
