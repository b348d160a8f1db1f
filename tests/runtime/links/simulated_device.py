"""CUDA's rules for streams, events and asynchronous copies, executed in host memory in any order they allow.

Each stream is a queue. A step runs the head of a random queue whose waits are met, so that operations without an event
between them sooner or later run in the wrong order. After a second recording of an event, later waits refer to the new
one, and earlier waits to the old one.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from expertcast.runtime.links.cuda import CudaLink
from expertcast.runtime.links.disk_cuda import CudaDiskLink
from expertcast.runtime.links.driver import CudaDevice
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.transfer import Transfer


class SimulatedStream:
    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.queue: deque[tuple[Callable[[], bool], Callable[[], Any]]] = deque()
        device.streams.append(self)

    def push(self, run: Callable[[], Any], ready: Callable[[], bool] = lambda: True) -> None:
        self.queue.append((ready, run))

    def wait_event(self, event: SimulatedEvent) -> None:
        record = event.record_made
        self.push(lambda: None, lambda: record is None or record.time is not None)

    def wait_stream(self, other: SimulatedStream) -> None:
        event = SimulatedEvent(other.device)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        self.device.run_until(lambda: not self.queue)


class _Record:
    time: float | None = None


class SimulatedEvent:
    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.record_made: _Record | None = None

    def record(self, stream: SimulatedStream) -> None:
        record = self.record_made = _Record()
        stream.push(lambda: setattr(record, "time", self.device.time))

    def query(self) -> bool:
        if not self.device.frozen:
            self.device.steps(self.device.random.randrange(3))
        return self.record_made is None or self.record_made.time is not None

    def synchronize(self) -> None:
        self.device.run_until(lambda: self.record_made is None or self.record_made.time is not None)

    def elapsed_time(self, later: SimulatedEvent) -> float:
        assert self.record_made is not None
        assert later.record_made is not None
        assert self.record_made.time is not None, "the event has not been reached"
        assert later.record_made.time is not None, "the event has not been reached"
        return (later.record_made.time - self.record_made.time) * 1e3


class SimulatedDevice(CudaDevice):
    """A simulated CUDA device in host memory."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(torch.device("cpu"))
        self.random = random.Random(seed)
        self.streams: list[SimulatedStream] = []
        self.time = 0.0
        self.fail_next_copy = False
        self.frozen = False
        """Whether operations run only when the host waits for them."""
        self.compute = SimulatedStream(self)

    def new_stream(self) -> SimulatedStream:
        return SimulatedStream(self)

    def current_stream(self) -> SimulatedStream:
        return self.compute

    def record(self, stream: SimulatedStream, *, timing: bool = False) -> SimulatedEvent:
        del timing
        event = SimulatedEvent(self)
        event.record(stream)
        return event

    def synchronize(self) -> None:
        self.run_until(lambda: not any(stream.queue for stream in self.streams))

    def to_device(self, target: torch.Tensor, source: torch.Tensor, stream: SimulatedStream) -> None:
        """Copy in two halves, so that a reader between them finds a torn block."""
        if self.fail_next_copy:
            self.fail_next_copy = False
            raise RuntimeError("copy refused")
        size, half = source.nbytes, source.nbytes // 2
        stream.push(lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), half))
        stream.push(lambda: ctypes.memmove(target.data_ptr() + half, source.data_ptr() + half, size - half))

    def to_host(self, source: torch.Tensor) -> torch.Tensor:
        host = torch.full_like(source, -1)
        self.to_device(host, source, self.current_stream())
        return host

    def send(self, values: torch.Tensor, stream: SimulatedStream) -> torch.Tensor:
        sent = torch.full_like(values, -1)
        self.to_device(sent, values, stream)
        return sent

    def steps(self, count: int) -> None:
        """Run up to `count` queued operations."""
        for _ in range(count):
            ready = [stream for stream in self.streams if stream.queue and stream.queue[0][0]()]
            if not ready:
                return
            self.time += 1e-6
            _, run = self.random.choice(ready).queue.popleft()
            run()

    def run_until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            before = self.time
            self.steps(1)
            assert self.time > before, "deadlock: every stream waits"


class Reader:
    """Launches kernels that look at slots when the compute stream comes to them.

    Args:
        device: that the stream is of.
        pool: of the slots.
        blocks: what a slot must hold, by key.
    """

    def __init__(self, device: SimulatedDevice, pool: SlotPool, blocks: Sequence[torch.Tensor]) -> None:
        self._device, self._pool, self._blocks = device, pool, blocks
        self.read = 0
        self.wrong = 0

    def launch(self, keys: dict[int, int]) -> None:
        """Two kernels, the layer's projections, that read the slot of each key."""

        def kernel() -> None:
            for key, slot in keys.items():
                self.read += 1
                self.wrong += not torch.equal(self._pool.block(slot), self._blocks[key])

        self._device.compute.push(kernel)
        self._device.compute.push(kernel)


def drive(
    seed: int, link: CudaLink, pool: SlotPool, blocks: Sequence[torch.Tensor], *, layers: int = 40, waited: float = 0.5
) -> Reader:
    """Random layers: some keys are read, others are forecast, promoted, dropped or overwritten.

    Args:
        seed: of what happens.
        link: attached, on a simulated device.
        pool: its slots.
        blocks: of the store.
        layers: so many.
        waited: share of the copies under way that are waited for before their slot is given away.
    """
    device = link.driver
    assert isinstance(device, SimulatedDevice)
    order, reader = random.Random(seed), Reader(device, pool, blocks)
    held: dict[int, tuple[int, Transfer]] = {}
    for _ in range(layers):
        needed = order.sample(range(len(blocks)), 2)
        forecast = [key for key in order.sample(range(len(blocks)), 3) if key not in needed]
        for key in needed + forecast:
            if key in held:
                continue
            if len(held) == pool.count:
                victim = order.choice([other for other in held if other not in needed])
                slot, copy = held.pop(victim)
                if not link.cancel(copy) and order.random() < waited:
                    link.wait(copy)
            else:
                slot = next(s for s in range(pool.count) if s not in {other for other, _ in held.values()})
            held[key] = slot, link.submit(key, slot, urgent=key in needed)
        for key in needed:
            if order.random() < 0.5:
                link.promote(held[key][1])
            link.wait(held[key][1])
        reader.launch({key: held[key][0] for key in needed})
        link.mark_read([held[key][0] for key in needed])
        device.steps(order.randrange(30))
        link.progress()
    device.synchronize()
    return reader


class DiskOnDevice(CudaDiskLink):
    """A disk link on a simulated CUDA device; files and readers are real."""

    def __init__(self, device: CudaDevice, buffers: int | None = None) -> None:
        super().__init__(buffers=buffers)
        self.driver = self.device = device
