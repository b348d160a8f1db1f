"""One coded expert on its way from a file into memory."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from expertcast.runtime.storage.arrival import Arrival
from expertcast.runtime.storage.codecs import Part
from expertcast.runtime.storage.decode_plan import Job
from expertcast.runtime.storage.direct_read import Read
from expertcast.runtime.storage.part_memory import Taken


@dataclass(slots=True, eq=False, kw_only=True)
class CodedRead(Arrival):
    """One expert; the target is its block, uint8 [block_bytes]."""

    key: int
    taken: Taken | None = None
    """While it is under way, the memory of its parts."""
    parts: list[Part] = field(default_factory=list)
    """Where they are read."""
    reads: list[Read] = field(default_factory=list)
    """What the disk was asked for."""
    reading: int = 0
    """Of these, how many have not come."""
    needs: list[int] = field(default_factory=list)
    """Pieces that have not come, of each job."""
    ready: deque[Job] = field(default_factory=deque)
    """Jobs that no thread has taken."""
    undone: int = 0
    """Jobs that are not done."""
    running: int = 0
    """Jobs that a thread does now."""

    @property
    def nbytes(self) -> int:
        """Of the block."""
        return self.target.numel()

    @property
    def bytes_read(self) -> int:
        return sum(part.bytes_read for part in self.reads)

    @property
    def over(self) -> bool:
        """Whether nothing more happens: all is done, or something failed and nothing touches its memory any more."""
        return not self.running and not self.reading and (not self.undone or self.error is not None)

    def fail(self, error: BaseException) -> None:
        """No more is done for it."""
        self.error = self.error or error
        self.ready.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bytes per second."""

    disk: float
    """Of the file, while anything is read."""
    decoding: float
    """Of experts' blocks, by one thread."""
    threads: int
    """That decode."""
