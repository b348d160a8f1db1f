"""One range of a file on its way into memory, as direct reads take it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from expertcast.runtime.storage.arrival import Arrival

SECTOR = 4096
"""Direct reads begin and end at a multiple of it, in the file as in memory. Disks ask for 512 or 4096."""
PIECE = 2 << 20
"""Bytes of one request: several threads share what is larger."""


@dataclass(slots=True, eq=False, kw_only=True)
class Read(Arrival):
    """As many bytes as the target has, from `offset` of the file on."""

    offset: int
    left: int = 0
    """Pieces that have not come."""

    @property
    def nbytes(self) -> int:
        """Bytes that are read."""
        return self.target.numel()

    @property
    def pieces(self) -> int:
        """Requests that it is read by."""
        return -(-self.nbytes // PIECE)

    @property
    def aligned(self) -> bool:
        """Whether it can be read straight into its target."""
        return not (self.offset % SECTOR or self.nbytes % SECTOR or self.target.data_ptr() % SECTOR)


def stamp_of(file: int) -> tuple[int, int]:
    """Bytes and time of change of an open file: the same as long as nobody writes to it."""
    found = os.fstat(file)
    return found.st_size, found.st_mtime_ns


def sectors(nbytes: int) -> int:
    """Bytes of the whole sectors that so many take."""
    return -(-nbytes // SECTOR) * SECTOR
