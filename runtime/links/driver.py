"""What the links of a CUDA device share: its streams and events, and small tensors to and from it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from expertcast.data.machine import with_index
from expertcast.predictors.messages import ExpertcastError

_MEMORY_TYPE, _HOST = 2, 1
"""CU_POINTER_ATTRIBUTE_MEMORY_TYPE and CU_MEMORYTYPE_HOST; an error for memory that the driver neither allocated nor
registered (CUDA driver API, cuPointerGetAttribute)."""
_DEVICE_POINTER = 3
"""CU_POINTER_ATTRIBUTE_DEVICE_POINTER: unlike the host's, it is right on systems that map memory elsewhere. Where
kernels may read pageable memory (HMM, Grace), that has one too (seen on GH200: github.com/NVIDIA/raft/pull/2480)."""


class CudaDevice:
    """One CUDA device as the links see it; tests put a simulation in its place.

    Every call is allowed whatever device is current in the calling thread.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = with_index(device)

    def new_stream(self, priority: int = 0) -> torch.cuda.Stream:
        """A stream on this device; the lower the number, the sooner it gets its turn."""
        return torch.cuda.Stream(self.device, priority=priority)  # type: ignore[no-untyped-call]

    def current_stream(self) -> torch.cuda.Stream:
        """The stream on which the caller's kernels run now."""
        return torch.cuda.current_stream(self.device)

    def new_event(self, *, timing: bool = False) -> torch.cuda.Event:
        """An event, with a clock if `timing`."""
        return torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]

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

    def to_device(self, target: Tensor, source: Tensor, stream: torch.cuda.Stream) -> None:
        """Queue a copy host -> device of as many bytes on a stream. The source is page-locked; from pageable memory the
        call takes as long as the copy."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def to_host(self, target: Tensor, source: Tensor, stream: torch.cuda.Stream) -> None:
        """Queue a copy device -> host, into page-locked memory, on a stream."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def address_of(self, host: int) -> int | None:
        """Where kernels find a host address: None in memory that is not page-locked."""
        kind, address = ctypes.c_uint(), ctypes.c_uint64()
        with torch.cuda.device(self.device):
            torch.cuda.current_stream().query()  # type: ignore[no-untyped-call]  # the context is current from here on
            driver = _driver()
            unknown = driver.cuPointerGetAttribute(ctypes.byref(kind), _MEMORY_TYPE, host)
            if unknown or kind.value != _HOST:
                return None
            status = driver.cuPointerGetAttribute(ctypes.byref(address), _DEVICE_POINTER, host)
        return None if status else address.value or None


class EventPool:
    """Events to use again: creating one costs as much as several records.

    An event may be taken again as soon as nobody will ask it anything: a stream that waits for it waits for the
    record that it saw, whatever is recorded later.
    """

    def __init__(self, device: CudaDevice, *, timing: bool = False) -> None:
        self._device = device
        self._timing = timing
        self._free: list[torch.cuda.Event] = []

    def take(self) -> torch.cuda.Event:
        """One that nobody uses."""
        return self._free.pop() if self._free else self._device.new_event(timing=self._timing)

    def give(self, event: torch.cuda.Event) -> None:
        """It is not used any more."""
        self._free.append(event)


class ForwardOrder:
    """Makes a forward's stream follow that of the forward before: slots and tables are the same for both.

    Within a forward copies and kernels are ordered by events; that a slot is ready is known on one stream only.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._last = device.current_stream()

    def enter(self) -> None:
        """A forward, or a graph's replay, starts on the current stream."""
        if self._device.capturing():  # nothing runs now, and a graph may not wait for what was launched before it
            return
        stream = self._device.current_stream()
        if stream != self._last:
            stream.wait_stream(self._last)
            self._last = stream


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
        begun, end = driver.new_event(timing=True), driver.new_event(timing=True)
        begun.record(stream)
        for _ in range(count):
            driver.to_device(target, host, stream)
        end.record(stream)
        end.synchronize()  # type: ignore[no-untyped-call]
        seconds.append(float(begun.elapsed_time(end)) / 1e3 / count)
    return min(seconds[1:])  # the first round pays for what is set up once


@cache
def _driver() -> ctypes.CDLL:
    """The driver that torch has loaded already, with the types of the functions used here."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuPointerGetAttribute.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)
    except (OSError, AttributeError) as error:
        raise ExpertcastError(f"NVIDIA's driver (libcuda.so.1) cannot be used ({error}): CUDA links need it") from error
    return driver


# Small tensors between host and device.
#
# A copy to the host runs on a stream of its own, behind an event of the tensor's stream, into page-locked memory: only
# the reader of the values waits for it. On the CPU nothing is copied.

_ENTRIES = 32
_ENTRY_BYTES = 4096
"""Ids of a decode step fit many times over; a prefill's take a buffer from torch's page-locked cache."""


class Pending:
    """Values on their way to the host."""

    __slots__ = ("_entry", "_host", "_values")

    def __init__(self, host: Tensor, entry: _Entry | None = None) -> None:
        self._host = host
        self._entry = entry
        self._values: object = None

    def tolist(self) -> Any:
        """What `Tensor.tolist()` gives; on CUDA once the copy has come. The second call costs nothing."""
        if self._values is None:
            if self._entry is not None:
                self._entry.finish()
                self._entry = None
            self._values = self._host.tolist()
        return self._values


class Readback:
    """Starts such copies, for one device; all calls come from one thread.

    A tensor must not be written to (by later kernels of its stream) before its values have been read.

    Args:
        driver: of the CUDA device that holds the tensors; None on the CPU.
        meanwhile: called again and again while values are waited for.
    """

    def __init__(self, driver: CudaDevice | None, meanwhile: Callable[[], None] = lambda: None) -> None:
        self._meanwhile = meanwhile
        self._ring: list[_Entry] = []
        self._next = 0
        if driver is not None:
            self._open(driver)

    def start(self, tensor: Tensor) -> Pending:
        """Queue the copy behind what the current stream has been given so far."""
        if not self._ring:
            return Pending(tensor)
        entry = self._ring[self._next]
        self._next = (self._next + 1) % len(self._ring)
        return entry.begin(tensor)

    def _open(self, cuda: CudaDevice) -> None:
        stream = cuda.new_stream(priority=-1)
        memory = _page_locked(_ENTRIES * _ENTRY_BYTES).view(_ENTRIES, _ENTRY_BYTES)
        self._ring = [_Entry(cuda, stream, buffer, self._meanwhile) for buffer in memory]


class _Entry:
    """One place of the ring: a buffer and two events, used again and again."""

    def __init__(
        self, cuda: CudaDevice, stream: torch.cuda.Stream, buffer: Tensor, meanwhile: Callable[[], None]
    ) -> None:
        self._cuda, self._meanwhile = cuda, meanwhile
        self._stream = stream
        self._buffer = buffer
        self._ready, self._arrived = cuda.new_event(), cuda.new_event()
        self._shaped: dict[tuple[torch.Size, torch.dtype], Tensor] = {}
        self._pending: Pending | None = None
        self._source: Tensor | None = None

    def begin(self, tensor: Tensor) -> Pending:
        if self._pending is not None:
            self._pending.tolist()  # the ring has come round to values that nobody has read so far
        # held until the copy is done: were it freed, its stream could write to the memory while it is read here
        source = self._source = tensor.contiguous()
        host = self._host(source)
        self._ready.record(self._cuda.current_stream())
        self._stream.wait_event(self._ready)
        self._cuda.to_host(host, source, self._stream)
        self._arrived.record(self._stream)
        self._pending = Pending(host, self)
        return self._pending

    def finish(self) -> None:
        self._cuda.wait(self._arrived, self._meanwhile)
        self._source = self._pending = None

    def _host(self, source: Tensor) -> Tensor:
        """The buffer in the tensor's shape; memory of its own where it does not fit."""
        key = (source.shape, source.dtype)
        host = self._shaped.get(key)
        if host is None:
            if source.nbytes > _ENTRY_BYTES:
                return _page_locked(source.nbytes).view(source.dtype).view(source.shape)
            host = self._buffer[: source.nbytes].view(source.dtype).view(source.shape)
            self._shaped[key] = host
        return host


class Sent:
    """Values on their way to the device."""

    __slots__ = ("_arrived", "_driver", "_values")

    def __init__(
        self, values: Tensor, driver: CudaDevice | None = None, arrived: torch.cuda.Event | None = None
    ) -> None:
        self._values, self._driver, self._arrived = values, driver, arrived

    def take(self) -> Tensor:
        """The values, for what is launched on the current stream from now on."""
        if self._arrived is not None:
            assert self._driver is not None
            self._driver.current_stream().wait_event(self._arrived)
            self._arrived = None
        return self._values


class Upload:
    """Small integers to a CUDA device, on a stream that copies experts: whoever reads them needs those copies too, and
    nothing else waits behind these.

    What :meth:`send` gave must have been read, by kernels that are launched, before the next call.

    Args:
        driver: of the device.
        stream: in whose order they travel.
        capacity: uploads that may be under way, or wait for their readers.
    """

    def __init__(self, driver: CudaDevice, stream: torch.cuda.Stream, capacity: int = 64) -> None:
        self._driver, self._stream = driver, stream
        self._ring: list[_Place | None] = [None] * capacity
        self._next = 0

    def send(self, values: Sequence[int]) -> Sent:
        """The values as int64 [n] on the device."""
        driver, index = self._driver, self._next
        before = self._ring[index - 1]
        if before is not None:
            before.read.record(driver.current_stream())
        self._next = (index + 1) % len(self._ring)
        place = self._ring[index]
        if place is None or place.host.numel() < len(values):
            if place is not None:
                place.read.synchronize()  # type: ignore[no-untyped-call]  # its memory is given back
            place = self._ring[index] = _Place(driver, len(values))
        else:
            place.arrived.synchronize()  # type: ignore[no-untyped-call]
        self._stream.wait_event(place.read)
        host, on_device = place.host[: len(values)], place.on_device[: len(values)]
        host.copy_(torch.tensor(values))
        driver.to_device(on_device, host, self._stream)
        place.arrived.record(self._stream)
        return Sent(on_device, driver, place.arrived)


class _Place:
    """One place of the ring: a page-locked buffer, one on the device, and when they may be used again."""

    def __init__(self, driver: CudaDevice, count: int) -> None:
        with torch.inference_mode(False):  # a buffer made in one could not be written to outside of it
            self.host = _page_locked(count * 8).view(torch.int64)
            self.on_device = torch.empty(count, dtype=torch.int64, device=driver.device)
        self.arrived, self.read = driver.new_event(), driver.new_event()
        self.read.record(driver.current_stream())  # whoever had the memory before has read it by then


def _page_locked(size: int) -> Tensor:
    with torch.inference_mode(False):  # a buffer made in one could not be written to outside of it
        return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
