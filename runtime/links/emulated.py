"""A link of set bandwidth and latency on any machine: a thread really copies, then waits out the rest.

Compute and copies overlap for real. What is emulated is the time one copy takes, latency + bytes / bandwidth,
one copy after another.
"""

from __future__ import annotations

import ctypes
import random
import sys
import threading
import time

from torch import Tensor

from expertcast.runtime.links.base import Link, check_rate
from expertcast.runtime.storage.layout import FULL
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from expertcast.runtime.storage.transfer import Transfer, TransferQueue

_SPIN_S = 60e-6
_NEGLIGIBLE_S = 5e-6
_PR_SET_TIMERSLACK = 29
_SMALL_COPY = 1 << 16
"""Bytes that move in less time than another thread takes to hand the interpreter's lock back."""

_memmove_locked = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


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
        self._free_at = 0.0
        """When the last copy that has begun arrives."""
        self._awaited = False
        """Compute is blocked on a copy: only then the thread may hold the interpreter to be on time."""
        self._thread: threading.Thread | None = None

    def attach(self, store: ExpertStore, pool: SlotPool) -> None:
        super().attach(store, pool)
        self._queue, self._free_at = TransferQueue(), 0.0
        self._thread = threading.Thread(target=self._work, name="expertcast-link", daemon=True)
        self._thread.start()

    @property
    def copy_s(self) -> float:
        return self.latency + self._store.layout.block_bytes / self.bandwidth

    def twin(self) -> Link:
        return EmulatedLink(self.bandwidth, self.latency)

    def submit(self, key: int, slot: int, *, urgent: bool, precision: str = FULL) -> Transfer:
        with self._queue.lock:  # the thread takes it once it is known since when it is due
            copy = super().submit(key, slot, urgent=urgent, precision=precision)
            copy.start = self.clock()
        return copy

    def _pump(self) -> None:
        """The thread takes what is queued."""

    def start(self, copy: Transfer) -> None:
        # from the moment it was due, not from when this thread woke up: a late wake-up costs no bandwidth
        start = max(copy.start, self._free_at)
        self._free_at = start + self._duration(copy)
        self._transfer(copy, self._free_at)
        self._complete(copy, start, self._free_at)

    def wait(self, copy: Transfer) -> None:
        self._awaited = True
        super().wait(copy)
        self._awaited = False

    def close(self) -> None:
        self._queue.close()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        _fine_timer()
        while (copy := self._queue.take()) is not None:
            self._run(copy)

    def _transfer(self, copy: Transfer, end: float) -> None:
        """Half of the block at once, half at the end: whoever computes without waiting finds a torn block."""
        half = self.block_bytes(copy.precision) // 2
        begun = time.perf_counter()
        self._move(copy, 0, half)
        self._sleep_until(end - (time.perf_counter() - begun))
        self._move(copy, half)
        if end - time.perf_counter() > _NEGLIGIBLE_S:
            self._sleep_until(end)

    def _move(self, copy: Transfer, start: int, end: int | None = None) -> None:
        move(self._source(copy), self._pool.block(copy.slot), start, end)

    def _sleep_until(self, deadline: float) -> None:
        """Sleep; while compute is blocked, yield in a short loop at the end: late by 10 us instead of 60 and more."""
        while (left := deadline - time.perf_counter()) > 0:
            if left > 2 * _SPIN_S:
                time.sleep(left - _SPIN_S)
            else:
                time.sleep(0 if self._awaited else left)

    def _duration(self, copy: Transfer) -> float:
        extra = self._random.random() * self._jitter if self._jitter else 0.0
        return self.latency + self.block_bytes(copy.precision) / self.bandwidth + extra


def _fine_timer() -> None:
    """Ask Linux to wake this thread within a microsecond of the deadline; elsewhere nothing is changed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


def move(source: Tensor, target: Tensor, start: int, end: int | None = None) -> None:
    """memmove of bytes of a block to the same place in its slot, with the interpreter's lock released unless the copy
    is small. `Tensor.copy_` would start a second team of OpenMP threads in the copying thread and take cores from
    compute.

    Args:
        source: uint8 on the host.
        target: uint8 on the host.
        start: of the bytes within the block.
        end: behind the last of them; None: all that follow.
    """
    count = (len(source) if end is None else end) - start
    (_memmove_locked if count <= _SMALL_COPY else ctypes.memmove)(
        target.data_ptr() + start, source.data_ptr() + start, count
    )
