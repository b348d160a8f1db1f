"""Host memory between a disk and a CUDA device: a few blocks that a reader fills and copies to the device empty.

A block belongs to one expert from the moment that the reader is asked for it until the copy to the device is done. Who
has none waits here, urgent ones first, and is dropped for nothing. An urgent one that finds no block free takes that of
the forecast asked for last, if the reader has not begun it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from torch import Tensor

from expertcast.data.memory import usable_processors
from expertcast.runtime.links.cuda import DeviceCopy
from expertcast.runtime.storage.arrival import Arrival, Reader
from expertcast.runtime.storage.direct_read import PIECE, sectors
from expertcast.runtime.storage.host_memory import HostMemory, PageLock

_FEWEST, _MOST = 4, 32
_DECODED, _COPIED = 4, 2
"""Blocks that are decoded at most, and on their way to the device, while the reader fills others."""


@dataclass(slots=True, eq=False)
class StagedCopy(DeviceCopy):
    """One expert on its way from a file to the device."""

    place: int | None = None
    """The block that it has."""
    read: Arrival | None = None
    """What the reader was asked."""
    age: float = 0.0
    """Seconds from the beginning of the read to the copy's call."""


class File(Protocol):
    """Where experts are read from; :class:`expertcast.runtime.storage.file_store.FileStore` is one."""

    def reader(self, threads: int, pace: float | None) -> Reader:
        """A new reader for what `read` makes."""

    def read(self, key: int, block: Tensor, arrival: Callable[[Any], None], urgent: bool) -> Arrival:
        """What is to be asked of a reader for one expert's block."""


def places_of(block_bytes: int, threads: int, *, coded: bool = False) -> int:
    """Blocks that keep so many requests of the disk under way while others are decoded, or copied to the device."""
    decoded = min(_DECODED, usable_processors() // 2) if coded else 0
    return min(_MOST, max(_FEWEST + decoded, -(-threads * PIECE // block_bytes) + _COPIED))


class Staging:
    """Blocks of host memory and the reader that fills them; all calls come from one thread.

    Args:
        file: where experts are read from.
        reader: of the file; closed with this.
        nbytes: of one expert.
        places: blocks, which are host memory beside whatever the device has.
        lock: page-locks them: None leaves them pageable.
    """

    def __init__(self, file: File, reader: Reader, nbytes: int, places: int, lock: PageLock | None = None) -> None:
        self._file, self._reader = file, reader
        size = sectors(nbytes)
        self._memory = HostMemory(places * size, lock)
        self._blocks = [self._memory.bytes[place * size :][:nbytes] for place in range(places)]
        self._free = list(range(places))
        self._urgent: deque[StagedCopy] = deque()
        self._forecasts: deque[StagedCopy] = deque()
        self._asked: dict[StagedCopy, None] = {}
        """What the reader has and nobody has taken, in the order in which it was asked."""
        self._come: SimpleQueue[StagedCopy] = SimpleQueue()
        """Put here by the threads that read."""
        self._noticed: list[StagedCopy] = []

    def ask(self, copy: StagedCopy) -> None:
        """Have an expert read as soon as there is a block for it."""
        (self._urgent if copy.urgent else self._forecasts).append(copy)
        self._fill()

    def promote(self, copy: StagedCopy) -> None:
        """What was asked for as a forecast is urgent now."""
        if copy in self._asked:
            assert copy.read is not None
            self._reader.promote(copy.read)
        else:
            self._forecasts.remove(copy)
            self._urgent.append(copy)
            self._fill()

    def cancel(self, copy: StagedCopy) -> bool:
        """Drop one that no thread has begun to read. True if nothing of it was or will be read."""
        if copy.place is None:
            (self._urgent if copy.urgent else self._forecasts).remove(copy)
            return True
        if not self._take_back(copy):
            return False
        self._fill()
        return True

    def wait(self) -> None:
        """Return when there is something to take; something has been asked for."""
        if not self._noticed:
            self._noticed.append(self._come.get())

    @property
    def ready(self) -> bool:
        """Whether there is something to take."""
        return bool(self._noticed) or not self._come.empty()

    def take(self) -> list[StagedCopy]:
        """Those that have been read, or could not be, since the last call."""
        taken, self._noticed = self._noticed, []
        try:
            while True:
                taken.append(self._come.get_nowait())
        except Empty:
            pass
        for copy in taken:
            del self._asked[copy]
        return taken

    def address(self, copy: StagedCopy) -> int:
        """Where the block begins that has been read."""
        assert copy.place is not None
        return self._blocks[copy.place].data_ptr()

    def give_back(self, copy: StagedCopy) -> None:
        """The block that one had is not used any more."""
        assert copy.place is not None
        self._free.append(copy.place)
        copy.place = None
        self._fill()

    def close(self) -> None:
        """Drop what waits, and return when nothing is being read."""
        self._urgent.clear()
        self._forecasts.clear()
        self._reader.close()

    def release(self) -> None:
        """Give the memory back; no copy from it is under way."""
        self._blocks.clear()
        self._memory.release()

    def _fill(self) -> None:
        """Ask the reader for as many as there are blocks."""
        while self._urgent or self._forecasts:
            if not self._free and not (self._urgent and self._make_room()):
                return
            copy = (self._urgent or self._forecasts).popleft()
            copy.place = self._free.pop()
            copy.read = self._file.read(copy.key, self._blocks[copy.place], partial(self._read, copy), copy.urgent)
            self._asked[copy] = None
            self._reader.submit(copy.read)

    def _read(self, copy: StagedCopy, read: Arrival) -> None:
        """Called by the thread that read the last of it."""
        del read
        self._come.put(copy)

    def _make_room(self) -> bool:
        """Take the block of the forecast asked for last; it comes first when there is one again."""
        for copy in reversed(self._asked):
            if not copy.urgent and self._take_back(copy):
                self._forecasts.appendleft(copy)
                return True
        return False

    def _take_back(self, copy: StagedCopy) -> bool:
        """Whether a thread has not begun an expert and will not."""
        if copy.read is None or not self._reader.cancel(copy.read):
            return False
        assert copy.place is not None
        self._free.append(copy.place)
        copy.place = copy.read = None
        del self._asked[copy]
        return True
