"""What a device in virtual time is made of: streams, events, and engines that copy.

All times are seconds of the device's clock, whose units of work a stream takes up in their order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from benchmarks.timed.device import TimedDevice

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
        held = self._device.sticky and self._last is not None and self._comes(self._last)
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
