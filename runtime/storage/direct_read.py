"""One range of a file on its way into memory, as direct reads take it."""

from __future__ import annotations

import _thread
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

SECTOR = 4096
"""Direct reads begin and end at a multiple of it, in the file as in memory. Disks ask for 512 or 4096."""
PIECE = 2 << 20
"""Bytes of one request: several threads share what is larger."""

_URGENT, _FORECAST = 0, 1


@dataclass(slots=True, eq=False)
class Read:
    """A range of the file on its way into memory."""

    offset: int
    target: Tensor
    """uint8, contiguous, in host memory: as many bytes are read."""
    arrival: Callable[[Read], None] | None = None
    """Called by the thread that read the last of it."""
    urgent: bool = False
    cancelled: bool = False
    begun: int = 0
    """Pieces that a thread has taken."""
    left: int = 0
    """Pieces that have not come."""
    error: BaseException | None = None
    start: float = 0.0
    end: float = 0.0
    """Seconds of the clock in which it was read."""
    _arrived: _thread.LockType = field(default_factory=_thread.allocate_lock, repr=False)
    """Held until all of it has come."""

    @property
    def nbytes(self) -> int:
        """Bytes that are read."""
        return self.target.numel()

    @property
    def pieces(self) -> int:
        """Requests that it is read by."""
        return -(-self.nbytes // PIECE)

    @property
    def rank(self) -> int:
        """What is lower comes first."""
        return _URGENT if self.urgent else _FORECAST

    def wait(self) -> None:
        """Return when all of it has come.

        Raises:
            ExpertcastError: it could not be read.
        """
        with self._arrived:
            pass
        if self.error is not None:
            raise self.error


def aligned(read: Read) -> bool:
    """Whether it can be read straight into its target."""
    return not (read.offset % SECTOR or read.nbytes % SECTOR or read.target.data_ptr() % SECTOR)
