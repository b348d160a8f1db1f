"""Small tensors from the device to the host, without holding up the stream that makes them.

On CUDA a copy runs on a stream of its own, which waits for the tensor's stream by an event, into page-locked memory;
whoever asks for the values waits for that copy only. On the CPU nothing is copied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
        self._device = torch.device(device)
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


def _page_locked(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
