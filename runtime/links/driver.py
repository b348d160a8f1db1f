"""What the links of a CUDA device share: its streams and events, and small tensors to and from it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from expertcast.data.machine import with_index


class CudaDevice:
    """One CUDA device as the links see it, by torch's own calls; tests put a simulation in its place.

    Every call is allowed whatever device is current in the calling thread.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = with_index(device)

    def clock(self) -> float:
        """Seconds on the host, from any start."""
        return time.perf_counter()

    def new_stream(self, priority: int = 0) -> torch.cuda.Stream:
        """A stream on this device; the lower the number, the sooner it gets its turn."""
        return torch.cuda.Stream(self.device, priority=priority)  # type: ignore[no-untyped-call]

    def current_stream(self) -> torch.cuda.Stream:
        """The stream on which the caller's kernels run now."""
        return torch.cuda.current_stream(self.device)

    def record(self, stream: torch.cuda.Stream, *, timing: bool = False) -> torch.cuda.Event:
        """A new event behind what a stream has been given so far, with a clock if `timing`."""
        event = torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def use(self, stream: torch.cuda.Stream) -> AbstractContextManager[None]:
        """Make a stream the current one for a while."""
        return torch.cuda.stream(stream)

    def capturing(self) -> bool:
        """Whether the current stream's work becomes a graph: nothing runs then, and no time passes."""
        return torch.cuda.is_current_stream_capturing()

    def synchronize(self) -> None:
        """Wait on the host for everything that was launched on the device."""
        torch.cuda.synchronize(self.device)

    def wait(self, event: torch.cuda.Event, meanwhile: Callable[[], None]) -> None:
        """Hold the host until an event has been reached, and call `meanwhile` again and again until then."""
        meanwhile()
        while not event.query():  # type: ignore[no-untyped-call]
            meanwhile()

    def follow(self, last: torch.cuda.Stream) -> torch.cuda.Stream:
        """A forward, or a graph's replay, starts on the current stream: it comes after the one before, on `last`.

        Within a forward copies and kernels are ordered by events; that a slot is ready is known on one stream only.

        Returns:
            The stream that the next forward follows.
        """
        if self.capturing():  # nothing runs now, and a graph may not wait for what was launched before it
            return last
        stream = self.current_stream()
        if stream != last:
            stream.wait_stream(last)
        return stream

    def to_device(self, target: Tensor, source: Tensor, stream: torch.cuda.Stream) -> None:
        """Queue a copy host -> device of as many bytes on a stream. The source is page-locked; from pageable memory the
        call takes as long as the copy."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def to_host(self, source: Tensor, stream: torch.cuda.Stream) -> Tensor:
        """Queue a copy device -> host on a stream, into new page-locked memory of torch's.

        The source's memory is not given to others before that: it may be let go of at once.
        """
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        with torch.cuda.stream(stream):
            host.copy_(source, non_blocking=True)
        source.record_stream(stream)
        return host

    def send(self, values: Tensor, stream: torch.cuda.Stream) -> Tensor:
        """Queue a copy host -> device of small values on a stream, into new memory that the current stream will read.

        torch's allocators give neither memory to others before the copy, and what the current stream reads, is over.
        """
        with torch.cuda.stream(stream):
            sent = values.pin_memory().to(self.device, non_blocking=True)
        sent.record_stream(self.current_stream())
        return sent


def copy_seconds(driver: CudaDevice, size: int, *, rounds: int = 5, count: int = 8) -> float:
    """Seconds of one page-locked copy to the device among several back to back, of the round disturbed least.

    Args:
        driver: of the device.
        size: bytes of each copy.
        rounds: how often it is measured.
        count: copies in a round.
    """
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    target = torch.empty(size, dtype=torch.uint8, device=driver.device)
    stream, seconds = driver.new_stream(), []
    stream.wait_stream(driver.current_stream())
    for _ in range(rounds + 1):
        begun = driver.record(stream, timing=True)
        for _ in range(count):
            driver.to_device(target, host, stream)
        end = driver.record(stream, timing=True)
        end.synchronize()  # type: ignore[no-untyped-call]
        seconds.append(float(begun.elapsed_time(end)) / 1e3 / count)
    return min(seconds[1:])  # the first round pays for what is set up once


class Pending:
    """Values on their way to the host."""

    __slots__ = ("_host", "_values", "_wait")

    def __init__(self, host: Tensor, wait: Callable[[], None] | None = None) -> None:
        self._host, self._wait = host, wait
        self._values: object = None

    def tolist(self) -> Any:
        """What `Tensor.tolist()` gives; on CUDA once the copy has come. The second call costs nothing."""
        if self._values is None:
            if self._wait is not None:
                self._wait()
            self._values = self._host.tolist()
        return self._values


class Readback:
    """Starts copies of small tensors to the host; all calls come from one thread.

    A copy runs on a stream of its own, behind what the tensor's stream has been given: only the reader of the values
    waits for it. A tensor must not be written to, by later kernels of its stream, before its values have been read.

    Args:
        driver: of the CUDA device that holds the tensors; None on the CPU, where nothing is copied.
        meanwhile: called again and again while values are waited for.
    """

    def __init__(self, driver: CudaDevice | None, meanwhile: Callable[[], None] = lambda: None) -> None:
        self._driver, self._meanwhile = driver, meanwhile
        self._stream = None if driver is None else driver.new_stream(priority=-1)

    def start(self, tensor: Tensor) -> Pending:
        """Queue the copy behind what the current stream has been given so far."""
        driver, stream = self._driver, self._stream
        if driver is None or stream is None:
            return Pending(tensor)
        source = tensor.contiguous()
        stream.wait_event(driver.record(driver.current_stream()))
        host = driver.to_host(source, stream)
        arrived = driver.record(stream)
        return Pending(host, lambda: driver.wait(arrived, self._meanwhile))
