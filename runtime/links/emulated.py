"""A link of configurable bandwidth and latency on any machine.

A thread really copies the bytes and then sleeps until latency + bytes / bandwidth seconds have passed. Compute and
copies overlap for real; copies run one after another.
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
"""Seconds before a deadline from which on the thread does not sleep while compute waits."""
_NEGLIGIBLE_S = 5e-6
_PR_SET_TIMERSLACK = 29
_SMALL_COPY = 1 << 16
"""Below this many bytes a copy is faster than releasing and reacquiring the interpreter's lock."""

_memmove_locked = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


class EmulatedLink(Link):
    """Emulates a link with `bandwidth` bytes per second and `latency` seconds per copy.

    Args:
        bandwidth: bytes per second.
        latency: seconds per copy.
        jitter: random extra seconds per copy, up to this many, for tests of event order.
        seed: seed of the random jitter.

    Raises:
        ExpertcastError: bandwidth or latency is out of range.
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
        """Time at which the last started copy arrives."""
        self._awaited = False
        """Whether compute waits for a copy. Only then may the thread keep the interpreter busy to be on time."""
        self._thread: threading.Thread | None = None

    def attach(self, store: ExpertStore, pool: SlotPool) -> None:
        super().attach(store, pool)
        self._queue, self._free_at = TransferQueue(), 0.0
        self._thread = threading.Thread(target=self._work, name="expertcast-link", daemon=True)
        self._thread.start()

    @property
    def copy_s(self) -> float:
        return self.latency + self._store.layout.block_bytes / self.bandwidth

    def unattached_copy(self) -> Link:
        return EmulatedLink(self.bandwidth, self.latency)

    def submit(self, key: int, slot: int, *, urgent: bool, precision: str = FULL) -> Transfer:
        with self._queue.lock:  # the thread must not take the copy before its start time is set
            copy = super().submit(key, slot, urgent=urgent, precision=precision)
            copy.start = self.clock()
        return copy

    def _pump(self) -> None:
        """Do nothing: the link's thread takes transfers from the queue."""

    def start(self, copy: Transfer) -> None:
        # The copy starts when it was submitted, not when this thread wakes up: a late wake-up costs no bandwidth.
        start = max(copy.start, self._free_at)
        extra = self._random.random() * self._jitter if self._jitter else 0.0
        seconds = self.latency + self.copy_bytes(copy.key, copy.precision) / self.bandwidth + extra
        self._free_at = start + seconds
        self._transfer(copy, self._free_at)
        self._complete(copy, start, self._free_at)

    def wait(self, copy: Transfer) -> None:
        self._awaited = True
        try:
            super().wait(copy)
        finally:
            self._awaited = False

    def close(self) -> None:
        self._queue.close()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        if sys.platform == "linux":  # it then wakes this thread within a microsecond of its deadline
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        while (copy := self._queue.take()) is not None:
            self._run(copy)

    def _transfer(self, copy: Transfer, end: float) -> None:
        """Copy half of the block at once and half at the end, so that compute without a wait reads a torn block."""
        source, target = self._source(copy), self._pool.block(copy.slot)
        half = len(source) // 2
        begun = time.perf_counter()
        move(source, target, 0, half)
        self._sleep_until(end - (time.perf_counter() - begun))
        move(source, target, half)
        if end - time.perf_counter() > _NEGLIGIBLE_S:
            self._sleep_until(end)

    def _sleep_until(self, deadline: float) -> None:
        """Sleep until `deadline`. While compute waits, busy-wait at the end: 10 us late instead of 60 and more."""
        while (left := deadline - time.perf_counter()) > 0:
            if left > 2 * _SPIN_S:
                time.sleep(left - _SPIN_S)
            else:
                time.sleep(0 if self._awaited else left)


def move(source: Tensor, target: Tensor, start: int, end: int | None = None) -> None:
    """Copy bytes of a block to the same offset in its slot.

    The interpreter's lock is released unless the copy is small. `Tensor.copy_` is not used because it would start a
    second team of OpenMP threads in the copying thread and take cores from compute.

    Args:
        source: uint8 on the host.
        target: uint8 on the host.
        start: offset of the first byte within the block.
        end: offset after the last byte; None: the end of the source.
    """
    count = (len(source) if end is None else end) - start
    (_memmove_locked if count <= _SMALL_COPY else ctypes.memmove)(
        target.data_ptr() + start, source.data_ptr() + start, count
    )
