"""A CUDA device in virtual time: streams, events and one copy engine per direction, and the host's clock beside them.

It answers who waits for whom. What the links and the engine call in the driver is the same; only how long things take
is made up, by :class:`DriverCosts`. Bytes are moved when they are asked for: a call can depend only on earlier ones, so
that values are right whatever the time; whether they would have been is said by `races`.

    host      | call | call | ...            | waits for an event |
    stream    visible `launch_s` after its call, in order, after what it waits for
    engine    one copy at a time; stays with a stream whose next copy is ready, as one does that changes to another
              channel only when the present one has nothing to do
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from benchmarks.timed.costs import DriverCosts
from expertcast.runtime.links.driver import CudaDevice

Direction = Literal["to_device", "to_host"]


@dataclass(slots=True, eq=False)
class Record:
    """One record of an event."""

    time: float | None = None
    """None: the stream has not come to it."""
    waiting: list[TimedStream] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Work:
    """One entry of a stream."""

    visible_at: float
    seconds: float = 0.0
    record: Record | None = None
    waits_for: Record | None = None
    engine: Direction | None = None
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    after: tuple[Work, ...] = ()
    """What read or wrote the same memory before: over by the time that this begins, or it is a race."""
    name: str = ""
    begun: float | None = None
    ended: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What ran on the device, in seconds of its clock."""

    name: str
    stream: int
    start: float
    end: float
    size: int
    """Bytes of a copy; 0 for kernels."""

    @property
    def seconds(self) -> float:
        """From start to end."""
        return self.end - self.start


class TimedStream:
    """Stands for `torch.cuda.Stream`."""

    def __init__(self, device: TimedDevice, number: int) -> None:
        self.device, self.number = device, number
        self.cuda_stream = self
        self.queue: deque[Work] = deque()
        self.busy = False

    def wait_event(self, event: TimedEvent) -> None:
        self.device.spend(self.device.costs.wait_s)
        if event.made is not None:
            self.device.push(self, Work(0.0, waits_for=event.made))

    def wait_stream(self, other: TimedStream) -> None:
        event = TimedEvent(self.device)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        self.device.wait_until(lambda: not self.queue)


class TimedEvent:
    """Stands for `torch.cuda.Event`: a record made again means the newer one to those who ask later."""

    def __init__(self, device: TimedDevice) -> None:
        self.device = device
        self.made: Record | None = None

    def record(self, stream: TimedStream | None = None) -> None:
        self.device.spend(self.device.costs.record_s)
        self.made = Record()
        self.device.push(stream or self.device.current_stream(), Work(0.0, record=self.made))

    def query(self) -> bool:
        self.device.spend(self.device.costs.query_s)
        return self.made is None or self.made.time is not None

    def synchronize(self) -> None:
        made = self.made
        self.device.wait_until(lambda: made is None or made.time is not None)

    def elapsed_time(self, later: TimedEvent) -> float:
        """Milliseconds, as torch has it."""
        assert self.made is not None, "the event was not recorded"
        assert later.made is not None, "the event was not recorded"
        assert self.made.time is not None, "the event has not been reached"
        assert later.made.time is not None, "the event has not been reached"
        return (later.made.time - self.made.time) * 1e3


class CopyEngine:
    """Copies of one direction."""

    def __init__(self, device: TimedDevice, way: Direction) -> None:
        self._device, self._way = device, way
        self._ready: deque[tuple[TimedStream, Work]] = deque()
        self._last: TimedStream | None = None
        self._busy = False

    def offer(self, stream: TimedStream, work: Work) -> None:
        """A copy is ready to run."""
        self._ready.append((stream, work))
        self._next()

    def _next(self) -> None:
        if self._busy or not self._ready:
            return
        held = self._last is not None and self._comes(self._last)
        chosen = next((entry for entry in self._ready if not held or entry[0] is self._last), None)
        if chosen is None:
            return
        self._ready.remove(chosen)
        stream, work = chosen
        self._busy, self._last = True, stream
        self._device.begin(work)
        self._device.at_time(self._device.at + work.seconds, lambda: self._done(stream, work))

    def _comes(self, stream: TimedStream) -> bool:
        """Whether the stream's next copy for this engine comes without waiting for anything else."""
        for work in stream.queue:
            if work.visible_at > self._device.at or work.ended is not None:
                return False
            if work.engine is not None or (work.record is None and work.waits_for is None):
                return work.engine == self._way
            if work.waits_for is not None and work.waits_for.time is None:
                return False
        return False

    def _done(self, stream: TimedStream, work: Work) -> None:
        self._busy = False
        self._device.finished(stream, work)  # which may offer the stream's next copy at once
        self._next()


class TimedDevice(CudaDevice):
    """Stands for a CUDA device, in host memory.

    Args:
        bandwidth: bytes per second of each copy engine.
        costs: of the driver's calls.
    """

    def __init__(self, bandwidth: float, costs: DriverCosts | None = None) -> None:
        super().__init__(torch.device("cpu"))
        self.bandwidth, self.costs = bandwidth, costs or DriverCosts()
        self._scaled: list[tuple[range, float]] = []
        self.now = 0.0
        """The host's clock, in seconds."""
        self.host_busy_s = 0.0
        """Seconds of the host's own work, waiting left out."""
        self.spans: list[Span] = []
        self.races: list[str] = []
        """What would have read or overwritten memory too early."""
        self.at = 0.0
        """The device's clock: everything before has happened."""
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._streams: list[TimedStream] = []
        self._engines: dict[Direction, CopyEngine] = {way: CopyEngine(self, way) for way in ("to_device", "to_host")}
        self._readers: dict[int, list[Work]] = {}
        self._writer: dict[int, Work] = {}
        self.compute = self._current = self.new_stream()

    # what links, readback and upload call

    def new_stream(self, priority: int = 0) -> TimedStream:
        del priority
        self._streams.append(TimedStream(self, len(self._streams)))
        return self._streams[-1]

    def current_stream(self) -> TimedStream:
        return self._current

    def clock(self) -> float:
        """The host's."""
        return self.now

    def record(self, stream: TimedStream, *, timing: bool = False) -> TimedEvent:
        event = self.new_event(timing=timing)
        event.record(stream)
        return event

    def new_event(self, *, timing: bool = False) -> TimedEvent:
        del timing
        return TimedEvent(self)

    def use(self, stream: TimedStream) -> AbstractContextManager[None]:
        @contextmanager
        def within() -> Iterator[None]:
            before, self._current = self._current, stream
            try:
                yield
            finally:
                self._current = before

        return within()

    def capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.wait_until(lambda: not any(stream.queue for stream in self._streams))

    def to_device(self, target: Tensor, source: Tensor, stream: TimedStream) -> None:
        self._copy(target.data_ptr(), source.data_ptr(), source.nbytes, stream, "to_device")

    def to_host(self, source: Tensor, stream: TimedStream) -> Tensor:
        host = torch.empty_like(source)
        self._copy(host.data_ptr(), source.data_ptr(), source.nbytes, stream, "to_host")
        return host

    def send(self, values: Tensor, stream: TimedStream) -> Tensor:
        sent = torch.empty_like(values)
        self.to_device(sent, values, stream)
        return sent

    # the clock

    def spend(self, seconds: float) -> None:
        """The host works for so long; the device goes on."""
        self.now += seconds
        self.host_busy_s += seconds
        self._run_to(self.now)

    def launch(
        self, seconds: float, *, reads: Iterable[int] = (), writes: Iterable[int] = (), name: str = "kernel",
        stream: TimedStream | None = None,
    ) -> None:  # fmt: skip
        """A kernel of so many seconds; what the host takes to launch it is the caller's to :meth:`spend`.

        Args:
            seconds: on the device, beside whatever other streams do.
            reads: addresses of memory that copies write to.
            writes: addresses of memory that it writes to itself.
            name: for `spans`.
            stream: None: the current one.
        """
        work = Work(0.0, seconds, reads=tuple(reads), writes=tuple(writes), name=name)
        self.note(work)
        self.push(stream or self._current, work)

    def scale(self, addresses: range, factor: float) -> None:
        """Copies to these addresses count for so many times their bytes: a tiny model in the place of a large one."""
        self._scaled.append((addresses, factor))

    def seconds_of(self, target: int, size: int) -> float:
        """Of a copy of `size` bytes, on the engine."""
        factor = next((factor for addresses, factor in self._scaled if target in addresses), 1.0)
        return size * factor / self.bandwidth

    def wait_until(self, reached: Callable[[], bool]) -> None:
        """The host sleeps until the device has come so far."""
        self._run_to(self.now)
        if reached():
            self.spend(self.costs.query_s)
            return
        while not reached():
            assert self._coming, "deadlock: the host waits for work that cannot run"
            self._run_to(self._coming[0][0])
        self.now = max(self.now, self.at) + self.costs.wake_s
        self._run_to(self.now)

    def wait(self, event: TimedEvent, meanwhile: Callable[[], None]) -> None:
        """As :meth:`expertcast.runtime.links.driver.CudaDevice.wait`, one look for each thing that happens."""
        meanwhile()
        while not event.query():
            assert self._coming, "deadlock: the host waits for work that cannot run"
            self.now = max(self.now, self._coming[0][0])
            self._run_to(self.now)
            meanwhile()

    def push(self, stream: TimedStream, work: Work) -> None:
        """Hand the device one entry of a stream."""
        work.visible_at = self.now + self.costs.launch_s
        stream.queue.append(work)
        self.at_time(work.visible_at, lambda: self._advance(stream))

    def _copy(self, target: int, source: int, size: int, stream: TimedStream, way: Direction) -> None:
        ctypes.memmove(target, source, size)
        self.spend(self.costs.copy_call_s)
        seconds = self.costs.copy_setup_s + self.seconds_of(target, size)
        work = Work(0.0, seconds, engine=way, name=way)
        if way == "to_device":
            work.writes = (target,)
            if source in self._writer:  # memory that something in virtual time fills
                work.reads = (source,)
        self.note(work)
        self.push(stream, work)

    def note(self, work: Work) -> None:
        """What it must come after, by the order of calls."""
        after = [self._writer[address] for address in (*work.reads, *work.writes) if address in self._writer]
        for address in work.writes:
            after += self._readers.pop(address, [])
            self._writer[address] = work
        for address in work.reads:
            self._readers.setdefault(address, []).append(work)
        work.after = tuple(after)

    def at_time(self, time: float, what: Callable[[], None]) -> None:
        """Something happens on the device at some time, not before now."""
        heapq.heappush(self._coming, (max(time, self.at), next(self._order), what))

    def _run_to(self, time: float) -> None:
        while self._coming and self._coming[0][0] <= time:
            self.at, _, what = heapq.heappop(self._coming)
            what()
        self.at = max(self.at, time)

    def _advance(self, stream: TimedStream) -> None:
        """Take up what is at the head of a stream, as far as it can be."""
        while stream.queue and not stream.busy:
            work = stream.queue[0]
            if work.visible_at > self.at:
                return  # its own entry in the clock comes back here
            if work.waits_for is not None:
                if work.waits_for.time is None:
                    if stream not in work.waits_for.waiting:
                        work.waits_for.waiting.append(stream)
                    return
                self._occupy(stream, work, self.costs.stream_entry_s)
            elif work.record is not None:
                self._occupy(stream, work, self.costs.stream_entry_s)
            elif work.engine is not None:
                stream.busy = True
                self._engines[work.engine].offer(stream, work)
            else:
                self.begin(work)
                self._occupy(stream, work, work.seconds)

    def _occupy(self, stream: TimedStream, work: Work, seconds: float) -> None:
        stream.busy = True
        self.at_time(self.at + seconds, lambda: self.finished(stream, work))

    def begin(self, work: Work) -> None:
        """A kernel or a copy begins now."""
        work.begun = self.at
        for other in work.after:
            if other.ended is None or other.ended > self.at:
                self.races.append(f"{work.name} at {self.at * 1e6:.1f} us before {other.name} was over")
        work.after = ()

    def finished(self, stream: TimedStream, work: Work) -> None:
        """An entry of a stream is over."""
        stream.busy = False
        stream.queue.popleft()
        work.ended = self.at
        if work.begun is not None and work.name:
            size = round((work.seconds - self.costs.copy_setup_s) * self.bandwidth) if work.engine else 0
            self.spans.append(Span(name=work.name, stream=stream.number, start=work.begun, end=self.at, size=size))
        if work.record is not None:
            work.record.time = self.at
            for waiting in work.record.waiting:
                self.at_time(self.at, lambda waiting=waiting: self._advance(waiting))  # type: ignore[misc]
        self._advance(stream)
