"""What moves experts from the store into slots: the base of all links, and the simplest one.

A link implements :meth:`Link.start`, which starts one transfer, and completes it. The base has the queue: urgent
transfers (this layer's misses) first, then forecasts in the order in which they were asked for. A forecast's transfer
that has not started can be promoted or cancelled.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.links.driver import CudaDevice
from expertcast.runtime.pools.cache import Pools
from expertcast.runtime.recording.recorder import Observer
from expertcast.runtime.storage.layout import FULL
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from expertcast.runtime.storage.transfer import Sent, Transfer, TransferQueue

MOST_LATENCY_S = 3600


def check_rate(bandwidth: float | None, latency: float = 0.0) -> None:
    """Refuse a link on which a copy takes no finite time.

    Args:
        bandwidth: bytes per second; None: the device's own.
        latency: seconds per copy.

    Raises:
        ExpertcastError: one of them is out of range.
    """
    if bandwidth is not None and not bandwidth >= 1:
        raise ExpertcastError(f"bandwidth={bandwidth}: give bytes per second, 1 or more, such as 4e9")
    if not 0 <= latency <= MOST_LATENCY_S:
        raise ExpertcastError(f"latency={latency}: give seconds, 0 to {MOST_LATENCY_S}")


class Link(ABC):
    """Starts copies store -> slot and makes compute wait for them.

    A link decides neither what is copied nor where to. All calls come from the thread that runs the model.
    """

    name: str
    decides_on_device: bool = False
    """Whether tables on the device say what is copied, which no host reads: that takes an engine of its own."""
    overlaps: bool = True
    """Whether copies are made beside the model's thread: else asking early gains nothing."""
    latency: float = 0.0
    """Seconds that a copy takes whatever its size, as far as the link knows."""
    by_address: bool = True
    """Whether it copies blocks from where they lie in memory: some stores have none there."""
    pools: Pools | None = None
    """What it keeps of experts beside the slots, known once attached: then these decide who may stay in a slot."""
    failure: BaseException | None = None
    """What the observer raised of a copy, in whatever thread, until :meth:`check` raises it in the model's."""

    driver: CudaDevice | None = None
    """Through which everything about this link is asked of a CUDA device; known once attached."""

    def __init__(self) -> None:
        self.bytes_moved = 0
        self.bytes_read = 0
        """Bytes read from a disk for the experts that arrived: fewer than `bytes_moved` where they lie compressed."""
        self.copies = 0
        self.busy_s = 0.0
        """Seconds in which a copy was under way."""
        self.held_s = 0.0
        """Seconds for which the last request held the model's thread up, where the link copies in it."""
        self.write_back_s = 0.0
        """Seconds of the link that an evicted expert takes: a store keeps all weights, and nothing is copied back."""
        self.observer = Observer()
        self._queue: TransferQueue[Any] = TransferQueue()
        self._counting = threading.Lock()

    def attach(self, store: ExpertStore, pool: SlotPool) -> None:
        """Called once, before the first copy.

        Raises:
            ExpertcastError: the store's experts lie where this link cannot read them.
        """
        if self.by_address and not store.addressable:
            raise ExpertcastError(
                f"link {self.name!r} copies experts from memory, and these lie coded in a file: use link 'disk', or "
                "codec 'raw'"
            )
        self._store = store
        self._pool = pool
        if pool.device.type == "cuda":
            self.driver = CudaDevice(pool.device)

    def clock(self) -> float:
        """Seconds, from any start."""
        return time.perf_counter() if self.driver is None else self.driver.clock()

    @property
    def copy_s(self) -> float:
        """Seconds that one expert's copy in full takes, measured unless the link knows; 0 before the first."""
        moved = self.bytes_moved
        return self.busy_s * self._store.layout.block_bytes / moved if moved else 0.0

    def seconds(self, key: int) -> float:
        """Seconds that an expert's copy in full takes now: less than `copy_s` where parts of it are in memory."""
        del key
        return self.copy_s

    def block_bytes(self, precision: str) -> int:
        """Bytes of one expert's copy.

        Raises:
            ExpertcastError: the store holds no copies in this precision.
        """
        return self._store.layout.block_bytes if precision == FULL else self._store.copies(precision).block_bytes

    def expand(self, copy: Transfer) -> None:
        """A packed copy has arrived: make it the block that kernels read, in its slot.

        Called once, after :meth:`wait` or when the copy is done, with compute's stream the current one.
        """
        start = time.perf_counter()
        self._pool.expand(copy.slot, self._store.copies(copy.precision))
        self.mark_read([copy.slot])  # it may be given up before anything else reads it
        self.observer.expanded(copy.key, time.perf_counter() - start)

    def twin(self) -> Link:
        """A new link, not attached, that is as fast as this one when nothing disturbs it.

        Raises:
            ExpertcastError: nothing is known about how fast this link is.
        """
        raise ExpertcastError(f"link {self.name!r} cannot be measured: use 'emulated', 'instant' or a CUDA device")

    def write_back(self) -> None:
        """An expert lost its slot to another one; called where it takes time."""

    def submit(self, key: int, slot: int, *, urgent: bool, precision: str = FULL) -> Transfer:
        """Queue a transfer, and start what may start; returns at once where the link can.

        Args:
            key: the expert.
            slot: where its block goes.
            urgent: a layer that runs needs it; else a forecast asks for it.
            precision: in less than the full one the packed block goes to the slot's first bytes: :meth:`expand` it.

        Raises:
            ExpertcastError: the store holds no copies in this precision.
        """
        if precision != FULL:
            self.block_bytes(precision)  # refuses one that is not there
        copy = Transfer(key, slot, urgent, precision)
        if self.overlaps:
            self._queue.submit(copy)
            self._pump()
        else:
            self._run(copy)
        return copy

    @abstractmethod
    def start(self, copy: Transfer) -> None:
        """Start one transfer, and complete it sooner or later: call :meth:`_complete` when it has arrived.

        What is raised here fails the transfer.
        """

    def wait(self, copy: Transfer) -> None:
        """Make compute wait until the copy has arrived.

        Raises:
            whatever the copy failed with.
        """
        assert not copy.cancelled
        self._queue.wait(copy)

    def promote(self, copy: Transfer) -> None:
        """Make a queued forecast urgent."""
        self._queue.promote(copy)
        self._pump()

    def cancel(self, copy: Transfer) -> bool:
        """Drop a copy that has not started. True if nothing was or will be moved."""
        return self._queue.cancel(copy)

    def poll(self, copy: Transfer) -> bool:
        """Whether the copy has arrived."""
        return copy.done

    def send(self, values: Sequence[int]) -> Sent:
        """Small integers to where the slots are, behind the copies that have been asked for so far.

        Args:
            values: one or more; they arrive as int64 [n].
        """
        return Sent(torch.frombuffer(array("q", values), dtype=torch.int64).to(self._pool.device))

    def in_order(self, keys: Sequence[int]) -> Sequence[int]:
        """The order in which copies of one layer's misses are best asked for."""
        return keys

    def read_ahead(self, keys: Sequence[int]) -> None:
        """Copies of these will be asked for: a store on disk reads them into memory meanwhile."""
        self._store.read_ahead(keys)

    def follow(self) -> None:
        """A forward starts: what it computes comes after what the one before it did, whatever stream is current."""

    def progress(self) -> None:
        """Set `done` on the copies that have arrived."""

    def mark_read(self, slots: list[int]) -> None:
        """Compute that reads these slots has been launched: later copies into them come after it."""
        del slots

    def check(self) -> None:
        """
        Raises:
            whatever the observer raised of a copy since the last call.
        """
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def reset(self) -> None:
        """Set the counters to zero."""
        self.bytes_moved, self.bytes_read, self.copies, self.busy_s = 0, 0, 0, 0.0

    def restart(self) -> None:
        """Drop what is queued; no copy is under way afterwards, and new ones may come."""
        self.close()
        self.attach(self._store, self._pool)

    def close(self) -> None:
        """Stop; no copy is under way afterwards. A second call does nothing."""
        self._queue.clear()

    def _pump(self) -> None:
        """Start what may start, in the queue's order."""
        with self._queue.lock:
            while (copy := self._queue.first()) is not None and self._may_start(copy):
                self._run(copy)

    def _may_start(self, copy: Transfer) -> bool:
        """Whether the first transfer of the queue may start now."""
        del copy
        return True

    def _run(self, copy: Transfer) -> None:
        copy.begin()
        try:
            self.start(copy)
        except Exception as error:  # handed to whoever waits
            copy.finish(self.clock(), error)

    def _source(self, copy: Transfer) -> Tensor:
        """What is copied, uint8 [bytes]."""
        if copy.precision != FULL:
            return self._store.copies(copy.precision).block(copy.key)
        return self._store.block(copy.key)

    def _copy(self, copy: Transfer) -> None:
        """Copy in the calling thread."""
        source = self._source(copy)
        self._pool.block(copy.slot)[: len(source)].copy_(source)

    def _complete(self, copy: Transfer, start: float, end: float) -> None:
        """A transfer has arrived, in whatever thread; `start` and `end` in seconds of the observer's clock."""
        try:
            self._count(copy, start, end)
        finally:
            copy.start = start
            copy.finish(end)

    def _count(self, copy: Transfer, start: float, end: float) -> None:
        with self._counting:
            self.bytes_moved += self.block_bytes(copy.precision)
            self.copies += 1
            self.busy_s += end - start
            self._tell(copy.key, copy.key // self._store.experts, start, end, copy.urgent)

    def _tell(self, key: int, layer: int, start: float, end: float, urgent: bool) -> None:
        """Tell the observer of a copy, in whatever thread; what it raises is kept for :meth:`check`."""
        try:
            self.observer.copied(key, layer, start, end, urgent)
        except BaseException as error:
            self.failure = self.failure or error


class InstantLink(Link):
    """Copies when asked, in the caller's thread: the simplest link, and the reference for the others."""

    name = "instant"
    overlaps = False
    by_address = False

    def start(self, copy: Transfer) -> None:
        start = end = self.clock()
        try:
            self._copy(copy)
        finally:
            end = self.clock()
            self.held_s = end - start
        self._complete(copy, start, end)

    def twin(self) -> Link:
        return InstantLink()

    def restart(self) -> None:
        """Nothing is ever queued."""
