"""Small integers from the host to the device without stopping the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Upload:
    """On CUDA through a ring of page-locked buffers, so that the host never waits for the stream to come so far.

    Args:
        capacity: buffers in the ring; the host waits only when it is so many uploads ahead of the device.
    """

    def __init__(self, device: torch.device, capacity: int = 64) -> None:
        self._device = device
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
