"""Base class of links, which move experts from the store into slots, and the simplest link.

A subclass implements :meth:`Link.start`: it starts one transfer and calls :meth:`Link._complete` when the bytes have
arrived. The base class keeps the queue: urgent transfers (misses of the current layer) come first, then prefetches in
the order of their submission. A prefetch that has not started can be promoted or cancelled.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.links.driver import CudaDevice
from expertcast.runtime.recording.learning import RunningSums
from expertcast.runtime.recording.recorder import Observer
from expertcast.runtime.storage.layout import FULL
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from expertcast.runtime.storage.transfer import Sent, Transfer, TransferQueue

if TYPE_CHECKING:
    from expertcast.runtime.pools.cache import Pools

_KEEP = 0.95
"""Weight that a copy leaves to the earlier ones in the mean time of a copy."""
MOST_LATENCY_S = 3600
"""Maximum latency per copy, in seconds."""


def check_rate(bandwidth: float | None, latency: float = 0.0) -> None:
    """Validate the speed of a link.

    Args:
        bandwidth: bytes per second, 1 or more; None: the device's own.
        latency: seconds per copy, 0 to 3600.

    Raises:
        ExpertcastError: a value is out of range.
    """
    if bandwidth is not None and not bandwidth >= 1:
        raise ExpertcastError(f"bandwidth={bandwidth} is out of range: use 1 or more bytes per second, such as 4e9")
    if not 0 <= latency <= MOST_LATENCY_S:
        raise ExpertcastError(f"latency={latency} is out of range: use 0 to {MOST_LATENCY_S} seconds")


class Link(ABC):
    """Copies experts from a store into slots, and makes compute wait for them.

    The caller chooses the experts and the slots. All methods are called from the thread that runs the model.
    """

    name: str
    overlaps: bool = True
    """Whether copies run beside the model's thread. Without overlap prefetching gains nothing."""
    latency: float = 0.0
    """Fixed seconds per copy, independent of its size, as far as the link knows."""
    window: int = 1
    """Prefetches that may have begun: an urgent copy waits for them."""
    by_address: bool = True
    """Whether the link reads blocks by their memory address. Stores of coded files have no such address."""
    pools: Pools | None = None
    """Host-memory pools of partial experts, known once attached. With pools, they decide which experts may stay in a
    slot.
    """
    failure: BaseException | None = None
    """First exception that the observer raised for a copy, in any thread; :meth:`check` raises it in the model's
    thread.
    """
    driver: CudaDevice | None = None
    """Streams and events of the slots' CUDA device, known once attached; None on the CPU."""
    awaited_until_s: float = 0.0
    """With a driver, when the link last saw that a copy had arrived for which compute waits; the host does not."""

    def __init__(self) -> None:
        self.bytes_moved = 0
        self.bytes_read = 0
        """Bytes read from a disk for experts that have arrived. Fewer than `bytes_moved` for compressed experts."""
        self.copies = 0
        self.busy_s = 0.0
        """Seconds during which at least one copy was in flight."""
        self._latest, self._counted = RunningSums(_KEEP), (0, 0.0)
        """Bytes and seconds of the latest copies; `bytes_moved` and `busy_s` up to which they are counted."""
        self.blocked_s = 0.0
        """Seconds for which the last request blocked the model's thread, for links that copy in that thread."""
        self.observer: Observer | None = None
        """Told of each copy; None: nothing observes."""
        self._queue: TransferQueue[Any] = TransferQueue()
        self._counting = threading.Lock()

    def attach(self, store: ExpertStore, pool: SlotPool) -> None:
        """Connect the link to a store and its slots. Call it once, before the first copy.

        Raises:
            ExpertcastError: the link cannot read this store's experts.
        """
        if self.by_address and not store.addressable:
            raise ExpertcastError(
                f"link {self.name!r} copies experts from memory, but this store keeps them on a disk: use link 'disk'"
            )
        self._store = store
        self._pool = pool
        self._layer_nbytes = list(map(pool.layout.nbytes_of, range(store.layers)))
        """Bytes of a full expert that a copy moves, by layer."""
        if pool.device.type == "cuda":
            self.driver = CudaDevice(pool.device)

    def clock(self) -> float:
        """Return the current time in seconds, from an arbitrary origin."""
        return time.perf_counter() if self.driver is None else self.driver.clock()

    @property
    def copy_s(self) -> float:
        """Seconds per full-precision copy of one expert, mostly of the latest copies; 0 before the first copy."""
        block_bytes, latest = self.block_bytes(FULL), self._latest
        with self._counting:
            nbytes, seconds = self.bytes_moved - self._counted[0], self.busy_s - self._counted[1]
            if nbytes:
                self._counted = self.bytes_moved, self.busy_s
                latest.fade(_KEEP ** (nbytes / block_bytes))
                latest.add(nbytes, seconds)
        return latest.total / latest.weight * block_bytes if latest.weight else 0.0

    def block_bytes(self, precision: str) -> int:
        """Return the bytes of one expert in this precision.

        Raises:
            ExpertcastError: the store has no copies in this precision.
        """
        return self._store.layout.block_bytes if precision == FULL else self._store.copies(precision).block_bytes

    def copy_bytes(self, key: int, precision: str) -> int:
        """Return the bytes that a copy of this expert moves: in full precision, those that its layer uses.

        Raises:
            ExpertcastError: as :meth:`block_bytes`.
        """
        return self._layer_nbytes[key // self._store.experts] if precision == FULL else self.block_bytes(precision)

    def expand(self, copy: Transfer) -> None:
        """Expand a packed copy that has arrived in its slot into the block that kernels read.

        Call it once per packed copy, after :meth:`wait` or when the copy is done, with the compute stream current.
        """
        start = time.perf_counter()
        self._pool.expand(copy.slot, self._store.copies(copy.precision))
        self.mark_read([copy.slot])  # the slot may be evicted before any other kernel reads it
        if self.observer is not None:
            self.observer.expanded(copy.key, time.perf_counter() - start)

    def unattached_copy(self) -> Link:
        """Return a new, unattached link with the undisturbed speed of this one.

        Raises:
            ExpertcastError: the speed of this link is unknown.
        """
        raise ExpertcastError(f"link {self.name!r} cannot be measured: use 'emulated', 'instant' or a CUDA device")

    def submit(self, key: int, slot: int, *, urgent: bool, precision: str = FULL) -> Transfer:
        """Queue a transfer and start as many queued transfers as the link allows.

        Returns at once unless the link copies in the calling thread.

        Args:
            key: the expert, layer * E + expert.
            slot: destination.
            urgent: True for a miss of the current layer, False for a prefetch.
            precision: a packed precision puts the packed block into the slot's first bytes; call :meth:`expand`
                after it.

        Returns:
            The transfer.

        Raises:
            ExpertcastError: the store has no copies in this precision.
        """
        if precision != FULL:
            self.block_bytes(precision)  # raises if the store lacks it
        copy = Transfer(key, slot, urgent, precision)
        if self.overlaps:
            self._queue.submit(copy)
            self._pump()
        else:
            self._run(copy)
        return copy

    @abstractmethod
    def start(self, copy: Transfer) -> None:
        """Start one transfer. The subclass calls :meth:`_complete` when the bytes have arrived.

        An exception raised here fails the transfer.
        """

    def wait(self, copy: Transfer) -> None:
        """Make compute wait until the copy has arrived.

        Raises:
            BaseException: the error with which the copy failed.
        """
        assert not copy.cancelled
        self._queue.wait(copy)

    def promote(self, copy: Transfer) -> None:
        """Move a queued prefetch to the urgent transfers."""
        self._queue.promote(copy)
        self._pump()

    def cancel(self, copy: Transfer) -> bool:
        """Drop a copy that has not started. Return True if no byte was or will be moved."""
        return self._queue.cancel(copy)

    def poll(self, copy: Transfer) -> bool:
        """Return whether the copy has arrived."""
        return copy.done

    def send(self, values: Sequence[int]) -> Sent:
        """Copy integers to the slots' device, after the copies submitted so far.

        Args:
            values: n >= 1 integers.

        Returns:
            Their copy, int64 [n].
        """
        return Sent(torch.frombuffer(array("q", values), dtype=torch.int64).to(self._pool.device))

    def in_order(self, keys: Sequence[int]) -> Sequence[int]:
        """Return the misses of one layer in the order in which to submit them."""
        return keys

    def follow(self) -> None:
        """Order a new forward pass after the previous one, whatever stream is current."""

    def progress(self) -> None:
        """Set `done` on the transfers that have arrived."""

    def mark_read(self, slots: list[int]) -> None:
        """Record that kernels reading these slots have been launched; later copies into the slots wait for them."""

    def check(self) -> None:
        """Raise an exception of the observer in the model's thread.

        Raises:
            BaseException: the first one that the observer raised for a copy since the last call.
        """
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def reset(self) -> None:
        """Set the counters to zero."""
        self.bytes_moved, self.bytes_read, self.copies, self.busy_s = 0, 0, 0, 0.0
        self._counted = 0, 0.0

    def restart(self) -> None:
        """Drop queued transfers and end those in flight; new ones may follow."""
        self.close()
        self.attach(self._store, self._pool)

    def close(self) -> None:
        """Stop the link; no copy is in flight afterwards. A second call does nothing."""
        self._queue.clear()

    def _pump(self) -> None:
        with self._queue.lock:
            while (copy := self._queue.first()) is not None and self._may_start(copy):
                self._run(copy)

    def _may_start(self, copy: Transfer) -> bool:
        """Return whether the first transfer of the queue may start now."""
        return True

    def _run(self, copy: Transfer) -> None:
        copy.started = True
        try:
            self.start(copy)
        except Exception as error:  # raised in the thread that waits
            copy.finish(self.clock(), error)

    def _source(self, copy: Transfer) -> Tensor:
        """Return the expert's block in the store, uint8 [bytes]."""
        if copy.precision != FULL:
            return self._store.copies(copy.precision).block(copy.key)
        return self._store.block(copy.key)

    def _copy(self, copy: Transfer) -> None:
        source = self._source(copy)
        self._pool.block(copy.slot)[: len(source)].copy_(source)

    def _complete(self, copy: Transfer, start: float, end: float) -> None:
        """Finish a transfer that has arrived. Any thread may call it.

        Args:
            copy: the transfer.
            start: seconds on the observer's clock.
            end: seconds on the observer's clock.
        """
        try:
            self._count(copy, start, end)
        finally:
            copy.start = start
            copy.finish(end)

    def _count(self, copy: Transfer, start: float, end: float) -> None:
        with self._counting:
            self.bytes_moved += self.copy_bytes(copy.key, copy.precision)
            self.copies += 1
            self.busy_s += end - start
            if self.observer is None:
                return
            try:
                self.observer.copied(copy.key, copy.key // self._store.experts, start, end, copy.urgent)
            except BaseException as error:  # raised by `check`
                self.failure = self.failure or error


class InstantLink(Link):
    """Copies in the calling thread during `submit`: the simplest link and the reference for the others."""

    name = "instant"
    overlaps = False
    by_address = False

    def start(self, copy: Transfer) -> None:
        start = end = self.clock()
        try:
            self._copy(copy)
        finally:
            end = self.clock()
            self.blocked_s = end - start
        self._complete(copy, start, end)

    def unattached_copy(self) -> Link:
        return InstantLink()

    def restart(self) -> None:
        """Do nothing: this link has no queue."""
