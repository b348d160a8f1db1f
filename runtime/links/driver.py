"""Streams and events of a CUDA device for its links, and copies of small tensors to and from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from expertcast.data.machine import with_index


class CudaDevice:
    """The CUDA operations that links use on one device. Tests replace it by a simulated device.

    Every method works whatever device is current in the calling thread.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = with_index(device)

    def clock(self) -> float:
        """Return the host's time in seconds, from an arbitrary origin."""
        return time.perf_counter()

    def new_stream(self) -> torch.cuda.Stream:
        """Return a new stream on this device."""
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def current_stream(self) -> torch.cuda.Stream:
        """Return the stream of the caller's kernels."""
        return torch.cuda.current_stream(self.device)

    def record(self, stream: torch.cuda.Stream, *, timing: bool = False) -> torch.cuda.Event:
        """Return a new event after the work queued on a stream so far; `timing` enables `elapsed_time`."""
        event = torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def synchronize(self) -> None:
        """Block the host until all work on the device is done."""
        torch.cuda.synchronize(self.device)

    def wait(self, event: torch.cuda.Event, meanwhile: Callable[[], None]) -> None:
        """Block the host until an event has occurred, calling `meanwhile` repeatedly."""
        meanwhile()
        while not event.query():  # type: ignore[no-untyped-call]
            meanwhile()

    def follow(self, last: torch.cuda.Stream) -> torch.cuda.Stream:
        """Order a forward pass on the current stream after the previous one, on `last`.

        Within a forward pass, events order copies and kernels. Whether a slot is ready is tracked for one stream only.

        Returns:
            The stream that the next forward pass follows.
        """
        stream = self.current_stream()
        if stream != last:
            stream.wait_stream(last)
        return stream

    def to_device(self, target: Tensor, source: Tensor, stream: torch.cuda.Stream) -> None:
        """Queue a copy host -> device of equal sizes on a stream.

        The call returns at once if the source is page-locked. From pageable memory it takes as long as the copy.
        """
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def to_host(self, source: Tensor) -> Tensor:
        """Queue a copy device -> host on the current stream, into new page-locked memory, and return that memory."""
        return torch.empty(source.shape, dtype=source.dtype, pin_memory=True).copy_(source, non_blocking=True)

    def send(self, values: Tensor, stream: torch.cuda.Stream) -> Tensor:
        """Queue a copy host -> device on a stream, into new memory for the current stream to read; return that memory.

        torch's allocators do not reuse the memory of either side before the copy and the current stream's reads are
        over.
        """
        with torch.cuda.stream(stream):
            sent = values.pin_memory().to(self.device, non_blocking=True)
        sent.record_stream(self.current_stream())
        return sent


def copy_seconds(driver: CudaDevice, size: int, *, rounds: int = 5, count: int = 8) -> float:
    """Measure the seconds per page-locked copy to the device, among copies back to back.

    Args:
        driver: the device.
        size: bytes per copy.
        rounds: number of measurements; the fastest one is returned.
        count: copies per measurement.

    Returns:
        Seconds per copy.
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
    return min(seconds[1:])  # the first round includes one-time set-up


class Pending:
    """Values of a tensor in transfer to the host."""

    __slots__ = ("_host", "_wait")

    def __init__(self, host: Tensor, wait: Callable[[], None] | None = None) -> None:
        self._host, self._wait = host, wait

    def tensor(self) -> Tensor:
        """Return the values on the host, and block until they have arrived."""
        if self._wait is not None:
            self._wait()
            self._wait = None
        return self._host

    def tolist(self) -> Any:
        """Return the values as `Tensor.tolist()` does, and block until they have arrived."""
        return self.tensor().tolist()


class Readback:
    """Copies small tensors to the host. All calls come from one thread.

    A copy runs on the current stream, between earlier and later work. Only the reader of the values waits for it.

    Args:
        driver: the CUDA device that holds the tensors; None on the CPU, where nothing is copied.
        meanwhile: called repeatedly while the host waits for values.
    """

    def __init__(self, driver: CudaDevice | None, meanwhile: Callable[[], None] = lambda: None) -> None:
        self._driver, self._meanwhile = driver, meanwhile

    def values(self, tensors: Iterable[Tensor]) -> list[Any]:
        """Return the values of some tensors of a device as `Tensor.tolist()` does, after the stream's work so far."""
        driver = self._driver
        assert driver is not None
        hosts = [driver.to_host(tensor.contiguous()) for tensor in tensors]
        driver.wait(driver.record(driver.current_stream()), self._meanwhile)
        return [host.tolist() for host in hosts]

    def start(self, tensor: Tensor) -> Pending:
        """Queue a copy of `tensor` after the current stream's work so far."""
        driver = self._driver
        if driver is None:
            return Pending(tensor)
        host = driver.to_host(tensor.contiguous())
        return Pending(host, partial(driver.wait, driver.record(driver.current_stream()), self._meanwhile))
