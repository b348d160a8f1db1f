"""Small tensors between host and device, without holding up the host or the stream that makes them.

On CUDA a copy to the host runs on a stream of its own, which waits for the tensor's stream by an event, into
page-locked memory; whoever asks for the values waits for that copy only. On the CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from expertcast.data.models import with_index
from expertcast.runtime.links.driver import CudaDevice

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
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = with_index(device)
        self._ring: list[_Entry] = []
        self._next = 0
        if self._device.type == "cuda":
            self._open(CudaDevice(self._device))

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
        self._ring = [_Entry(cuda, stream, buffer) for buffer in memory]


class _Entry:
    """One place of the ring: a buffer and two events, used again and again."""

    def __init__(self, cuda: CudaDevice, stream: torch.cuda.Stream, buffer: Tensor) -> None:
        self._cuda = cuda
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
        self._cuda.to_host(host.data_ptr(), source.data_ptr(), source.nbytes, self._stream)
        self._arrived.record(self._stream)
        self._pending = Pending(host, self)
        return self._pending

    def finish(self) -> None:
        self._arrived.synchronize()  # type: ignore[no-untyped-call]
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


class Upload:
    """Small integers to the device; on CUDA through a ring of page-locked buffers.

    Args:
        capacity: buffers in the ring; the host waits only when it is so many uploads ahead of the device.
    """

    def __init__(self, device: torch.device, capacity: int = 64) -> None:
        self._device = with_index(device)
        self._cuda = device.type == "cuda"
        self._ring: list[tuple[Tensor, torch.cuda.Event] | None] = [None] * capacity
        self._next = 0

    def send(self, values: Sequence[int]) -> Tensor:
        """The values as int64 [n] on the device; ready for what is launched on the current stream from now on."""
        if not self._cuda:
            return torch.tensor(values, device=self._device)
        index = self._next
        self._next = (index + 1) % len(self._ring)
        entry = self._ring[index]
        if entry is None or entry[0].numel() < len(values):
            with torch.inference_mode(False):  # a buffer made in one could not be written to outside of it
                buffer = torch.empty(len(values), dtype=torch.int64, pin_memory=torch.cuda.is_available())
            entry = buffer, torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ring[index] = entry
        else:
            entry[1].synchronize()  # type: ignore[no-untyped-call]
        buffer, sent = entry
        host = buffer[: len(values)]
        host.copy_(torch.tensor(values))
        on_device = host.to(self._device, non_blocking=True)
        sent.record(torch.cuda.current_stream(self._device))
        return on_device


def _page_locked(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
