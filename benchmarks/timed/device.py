"""A CUDA device in virtual time: streams, events, one copy engine per direction, and the host's clock.

It simulates waiting between host, streams and copy engines. The links and the engine make their real driver calls; only
durations are assumed, from :class:`DriverCosts`. Bytes are moved at the call: a call can depend only on earlier ones,
so values are correct whatever the time. `races` lists accesses that would have come too early.

    host      | call | call | ...            | waits for an event |
    stream    visible `launch_s` after its call, runs in order, after the events that it waits for
    engine    one copy at a time; prefers the stream of its last copy if that stream's next copy is ready, as real
              engines change channels only when the current one is idle
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from benchmarks.timed.costs import DriverCosts
from expertcast.runtime.links.driver import CudaDevice

Direction = Literal["to_device", "to_host"]


@dataclass(slots=True, eq=False)
class Record:
    """One recording of an event."""

    time: float | None = None
    """Time at which the stream reached it; None before."""
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
    """Earlier accesses of the same memory. If one of them is not over when this work begins, there is a race."""
    name: str = ""
    begun: float | None = None
    ended: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Work that ran on the device; times in seconds of its clock."""

    name: str
    stream: int
    start: float
    end: float
    size: int
    """Bytes of a copy; 0 for kernels."""

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end - self.start


class TimedStream:
    """Simulates `torch.cuda.Stream`."""

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
    """Simulates `torch.cuda.Event`. Later waits and queries refer to the latest recording."""

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
        """Return milliseconds, as torch does."""
        assert self.made is not None, "the event was not recorded"
        assert later.made is not None, "the event was not recorded"
        assert self.made.time is not None, "the event has not been reached"
        assert later.made.time is not None, "the event has not been reached"
        return (later.made.time - self.made.time) * 1e3


class CopyEngine:
    """Copy engine of one direction."""

    def __init__(self, device: TimedDevice, way: Direction) -> None:
        self._device, self._way = device, way
        self._ready: deque[tuple[TimedStream, Work]] = deque()
        self._last: TimedStream | None = None
        self._busy = False

    def offer(self, stream: TimedStream, work: Work) -> None:
        """Queue a copy that is ready to run."""
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
        """Return whether the stream's next copy for this engine comes without another wait."""
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
        self._device.finished(stream, work)  # may offer the stream's next copy at once
        self._next()


class TimedDevice(CudaDevice):
    """Simulates a CUDA device in host memory.

    Args:
        bandwidth: bytes per second of each copy engine.
        costs: durations of driver calls.
    """

    def __init__(self, bandwidth: float, costs: DriverCosts | None = None) -> None:
        super().__init__(torch.device("cpu"))
        self.bandwidth, self.costs = bandwidth, costs or DriverCosts()
        self._scaled: list[tuple[range, float]] = []
        self.now = 0.0
        """Host time in seconds."""
        self.host_busy_s = 0.0
        """Seconds of the host's own work, without waiting."""
        self.spans: list[Span] = []
        self.races: list[str] = []
        """Accesses that would have read or overwritten memory too early."""
        self.at = 0.0
        """Device time in seconds; everything before it has happened."""
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._streams: list[TimedStream] = []
        self._engines: dict[Direction, CopyEngine] = {way: CopyEngine(self, way) for way in ("to_device", "to_host")}
        self._readers: dict[int, list[Work]] = {}
        self._writer: dict[int, Work] = {}
        self.compute = self._current = self.new_stream()

    # interface of CudaDevice

    def new_stream(self) -> TimedStream:
        self._streams.append(TimedStream(self, len(self._streams)))
        return self._streams[-1]

    def current_stream(self) -> TimedStream:
        return self._current

    def clock(self) -> float:
        """Return the host time."""
        return self.now

    def record(self, stream: TimedStream, *, timing: bool = False) -> TimedEvent:
        event = self.new_event(timing=timing)
        event.record(stream)
        return event

    def new_event(self, *, timing: bool = False) -> TimedEvent:
        del timing
        return TimedEvent(self)

    def synchronize(self) -> None:
        self.wait_until(lambda: not any(stream.queue for stream in self._streams))

    def to_device(self, target: Tensor, source: Tensor, stream: TimedStream) -> None:
        self._copy(target.data_ptr(), source.data_ptr(), source.nbytes, stream, "to_device")

    def to_host(self, source: Tensor) -> Tensor:
        host = torch.empty_like(source)
        self._copy(host.data_ptr(), source.data_ptr(), source.nbytes, self._current, "to_host")
        return host

    def send(self, values: Tensor, stream: TimedStream) -> Tensor:
        sent = torch.empty_like(values)
        self.to_device(sent, values, stream)
        return sent

    # the clock

    def spend(self, seconds: float) -> None:
        """Advance the host by its own work; the device runs meanwhile."""
        self.now += seconds
        self.host_busy_s += seconds
        self._run_to(self.now)

    def launch(
        self, seconds: float, *, reads: Iterable[int] = (), writes: Iterable[int] = (), name: str = "kernel",
        stream: TimedStream | None = None,
    ) -> None:  # fmt: skip
        """Launch a kernel. The caller adds the host's launch time with :meth:`spend`.

        Args:
            seconds: duration on the device, beside other streams.
            reads: addresses of memory that copies write to.
            writes: addresses of memory that the kernel writes to.
            name: name in `spans`.
            stream: the stream; None: the current one.
        """
        work = Work(0.0, seconds, reads=tuple(reads), writes=tuple(writes), name=name)
        self.note(work)
        self.push(stream or self._current, work)

    def scale(self, addresses: range, factor: float) -> None:
        """Multiply the bytes of copies to these addresses, so that a tiny model represents a large one."""
        self._scaled.append((addresses, factor))

    def seconds_of(self, target: int, size: int) -> float:
        """Return the engine seconds of a copy of `size` bytes."""
        factor = next((factor for addresses, factor in self._scaled if target in addresses), 1.0)
        return size * factor / self.bandwidth

    def wait_until(self, reached: Callable[[], bool]) -> None:
        """Block the host until a condition on the device holds."""
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
        """Wait as :meth:`expertcast.runtime.links.driver.CudaDevice.wait`, with one query per event on the device."""
        meanwhile()
        while not event.query():
            assert self._coming, "deadlock: the host waits for work that cannot run"
            self.now = max(self.now, self._coming[0][0])
            self._run_to(self.now)
            meanwhile()

    def push(self, stream: TimedStream, work: Work) -> None:
        """Append an entry to a stream."""
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
            if source in self._writer:  # memory that simulated work fills
                work.reads = (source,)
        self.note(work)
        self.push(stream, work)

    def note(self, work: Work) -> None:
        """Note the earlier work that this work must follow, by the order of calls."""
        after = [self._writer[address] for address in (*work.reads, *work.writes) if address in self._writer]
        for address in work.writes:
            after += self._readers.pop(address, [])
            self._writer[address] = work
        for address in work.reads:
            self._readers.setdefault(address, []).append(work)
        work.after = tuple(after)

    def at_time(self, time: float, what: Callable[[], None]) -> None:
        """Schedule an action on the device, not before now."""
        heapq.heappush(self._coming, (max(time, self.at), next(self._order), what))

    def _run_to(self, time: float) -> None:
        while self._coming and self._coming[0][0] <= time:
            self.at, _, what = heapq.heappop(self._coming)
            what()
        self.at = max(self.at, time)

    def _advance(self, stream: TimedStream) -> None:
        """Start the entries at the head of a stream as far as possible."""
        while stream.queue and not stream.busy:
            work = stream.queue[0]
            if work.visible_at > self.at:
                return  # a scheduled action calls this again
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
        """Begin a kernel or copy now, and note races."""
        work.begun = self.at
        for other in work.after:
            if other.ended is None or other.ended > self.at:
                self.races.append(f"{work.name} at {self.at * 1e6:.1f} us before {other.name} was over")
        work.after = ()

    def finished(self, stream: TimedStream, work: Work) -> None:
        """End an entry of a stream."""
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
