"""A link without the host: what is copied is decided by tensors on the device and done by a kernel.

Copies run on a stream of their own, one call after another, so that no two calls write to a slot out of order. Each
call waits for the compute stream first (for its table, and for the last readers of the slots it overwrites); compute
waits for the calls whose slots it reads. Fork and join are events, which a CUDA graph records like any kernel.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.links.base import Copy, Link
from expertcast.runtime.links.carve_out import CarveOut
from expertcast.runtime.links.copy import BlockCopier, block_copier
from expertcast.runtime.links.driver import EventPool, ForwardOrder
from expertcast.runtime.links.tables import COUNTS, DeviceResidency, KernelResidency, Moves
from expertcast.runtime.recording.statistics import LayerStatistics, RunStatistics
from expertcast.runtime.storage.precision import FULL
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore

_TIMED = 256
"""Calls whose times may be outstanding before they are counted."""
_COPIED = [COUNTS.index("misses"), COUNTS.index("prefetched")]


@dataclass(slots=True, eq=False)
class _Call:
    arrived: torch.cuda.Event
    moves: Moves | None
    """The call's tables until compute has waited for it: freed before, they could be written over."""
    layer: int
    urgent: bool
    begun: torch.cuda.Event | None
    """None in a graph's call, which is not timed and whose events are the graph's."""


class KernelLink(Link):
    """Moves experts by a kernel that reads page-locked memory (CUDA), or by plain copies (the CPU's reference).

    It keeps its own tables (`residency`); :class:`expertcast.runtime.engine.device.DeviceEngine` drives it. Used as a
    plain link, it copies one block a call.

    `bytes_moved` and `copies` are counted on the device and read when they are asked for. `busy_s` is the time
    between events around each call; a CUDA graph's calls are not in it.
    """

    name = "kernel"
    decides_on_device = True

    def __init__(self) -> None:
        self._plain = 0
        """Copies made one at a time."""
        self._counts = torch.zeros(0, len(COUNTS))
        super().__init__()

    def attach(self, store: ExpertStore, pool: SlotPool) -> None:
        super().attach(store, pool)
        self._copier: BlockCopier = block_copier(store, pool)
        tables = KernelResidency if pool.device.type == "cuda" else DeviceResidency
        self.residency = tables(layers=store.layers, experts=store.experts, slots=pool.count, device=pool.device)
        self._counts = self.residency.counts
        self._stream = None if self.driver is None else self.driver.new_stream()
        if self.driver is not None:
            self._order = ForwardOrder(self.driver)
            self._forks, self._events = EventPool(self.driver), EventPool(self.driver, timing=True)
        self._under_way: list[_Call] = []
        """Calls that compute has not waited for."""
        self._timed: deque[_Call] = deque()
        """Calls whose times are not counted, in the same order."""
        self.carve_out = CarveOut(self._copier.programs)
        """Entered where experts run beside copies: their grouped matmul leaves the copies' multiprocessors alone."""

    def move(self, moves: Moves, layer: int = -1, *, urgent: bool = True) -> None:
        """Queue the copies behind everything the current stream has been given so far.

        Args:
            moves: which block goes into which slot.
            layer: for the observer, which gets one span per call.
            urgent: likewise.
        """
        if self._stream is None:
            start = time.perf_counter()
            self._copier.copy(moves)
            self._took(layer, start, time.perf_counter(), urgent)
            return
        assert self.driver is not None
        begun = None
        if self.driver.capturing():
            self._stream.wait_stream(self.driver.current_stream())
            arrived = self.driver.new_event()
        else:
            self._fork(self.driver.current_stream())
            begun, arrived = self._events.take(), self._events.take()
        with self.driver.use(self._stream):
            if begun is not None:
                begun.record(self._stream)
            self._copier.copy(moves)
            arrived.record(self._stream)
        call = _Call(arrived, moves, layer, urgent, begun)
        self._under_way.append(call)
        if begun is not None:
            self._timed.append(call)
            if len(self._timed) > _TIMED:
                self._collect()

    def ticket(self) -> int:
        """Number of calls under way: what :meth:`join` waits for."""
        return len(self._under_way)

    def join(self, ticket: int) -> None:
        """Make the current stream wait for the first `ticket` calls under way."""
        if self.driver is None or not ticket:
            return
        self.driver.current_stream().wait_event(self._under_way[ticket - 1].arrived)
        self._joined(ticket)

    def beside_copies(self) -> AbstractContextManager[object]:
        """To run kernels in that read slots: :attr:`carve_out` while calls are under way, else nothing."""
        return self.carve_out if self._under_way else nullcontext()

    def follow(self) -> None:
        if self.driver is not None:
            self._order.enter()

    def submit(self, key: int, slot: int, *, urgent: bool, precision: str = FULL) -> Copy:
        if precision != FULL:
            raise ExpertcastError(f"link 'kernel' moves experts in full, not as {precision}: take link 'cuda'")
        moved = torch.ones(1, dtype=torch.bool, device=self._pool.device)
        numbers = torch.tensor([key, slot], device=self._pool.device)
        self.move(Moves(numbers[:1], numbers[1:], moved), key // self._store.experts, urgent=urgent)
        self.join(self.ticket())
        self._plain += 1
        return Copy(key, slot, urgent, started=True, done=True)

    def wait(self, copy: Copy) -> None:
        assert copy.done

    def synchronize(self) -> None:
        """Wait on the host until everything that was launched has run."""
        if self.driver is not None:
            self.driver.synchronize()
            self._joined(len(self._under_way))
            self._collect()

    @property
    def copies(self) -> int:
        return self._plain + int(self._counts[:, _COPIED].sum())

    @copies.setter
    def copies(self, value: int) -> None:
        self._plain = value
        self._counts[:, _COPIED] = 0

    @property
    def bytes_moved(self) -> int:
        copies = self.copies
        return copies and copies * self._store.layout.block_bytes

    @bytes_moved.setter
    def bytes_moved(self, value: int) -> None:
        """Follows `copies`."""

    def reset(self) -> None:
        self.synchronize()
        super().reset()

    def close(self) -> None:
        self.synchronize()
        self.__dict__.pop("_copier", None)  # it may hold the slots' memory, which the experts need to be put back

    def _fork(self, stream: torch.cuda.Stream) -> None:
        """Copies come after what a stream has been given; its `wait_stream` would make an event of its own."""
        event = self._forks.take()
        event.record(stream)
        assert self._stream is not None
        self._stream.wait_event(event)
        self._forks.give(event)

    def _joined(self, count: int) -> None:
        """Compute comes after the first `count` calls under way."""
        for call in self._under_way[:count]:
            call.moves = None
        del self._under_way[:count]

    def _collect(self) -> None:
        """Count the times of calls that are over and waited for: nobody asks their events anything from then on."""
        while self._timed and self._timed[0].moves is None and self._timed[0].arrived.query():  # type: ignore[no-untyped-call]
            call = self._timed.popleft()
            assert call.begun is not None
            self._events.give(call.begun)
            self._events.give(call.arrived)
            start = self.observer.device_time(call.begun)
            self._took(call.layer, start, start + call.begun.elapsed_time(call.arrived) / 1e3, call.urgent)

    def _took(self, layer: int, start: float, end: float, urgent: bool) -> None:
        self.busy_s += end - start
        self._tell(-1, layer, start, end, urgent)


class DeviceStatistics(RunStatistics):
    """The run's counters, kept on the device; reading them waits for it.

    Nobody there sees whether a forecast's copy came in time, how long a layer waited, or what was evicted: `waited_s`,
    `prefetched_in_time`, `evicted` and `collisions` stay 0.
    """

    uncounted = frozenset({*LayerStatistics.__slots__} - {*COUNTS, "bytes_moved"})

    def __init__(self, link: KernelLink, block_bytes: int) -> None:
        self._counts = link.residency.counts
        self._block_bytes = block_bytes

    @property
    def layers(self) -> list[LayerStatistics]:  # type: ignore[override]
        layers = []
        for row in self._counts.tolist():
            counted = dict(zip(COUNTS, row, strict=True))
            moved = counted["misses"] + counted["prefetched"]
            layers.append(LayerStatistics(**counted, bytes_moved=moved * self._block_bytes))
        return layers

    def reset(self) -> None:
        with self.resetting():
            self._counts.zero_()
