"""Reads ranges of a file into memory of the caller's, past the system's page cache: what is read costs no other memory.

A range is read in pieces by several threads at once, for a disk is fast only with several large requests under way;
neighbouring ranges that are requested together are one request. Urgent requests come first, and requests that no
thread has begun can be cancelled.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.storage.memory import HostMemory
from expertcast.runtime.storage.transfer import Transfer, TransferQueue

# Direct reads of a file.

SECTOR = 4096
"""Direct reads begin and end at a multiple of it, in the file as in memory. Disks need 512 or 4096."""
PIECE = 2 << 20
"""Bytes of one request: several threads share what is larger."""


@dataclass(slots=True, eq=False, kw_only=True)
class Read(Transfer):
    """As many bytes as the target has, from `offset` of the file on."""

    target: Tensor
    """uint8, contiguous, in host memory: what is filled."""
    offset: int
    taken: int = 0
    """Pieces that a thread has begun."""
    came: int = 0
    """Pieces that have come."""

    @property
    def nbytes(self) -> int:
        """Bytes that are read."""
        return self.target.numel()

    @property
    def bytes_read(self) -> int:
        """Bytes of the file that were read for it."""
        return self.nbytes

    @property
    def pieces(self) -> int:
        """Requests that it is read by."""
        return -(-self.nbytes // PIECE)

    @property
    def waiting(self) -> bool:
        return self.taken < self.pieces and not self.cancelled

    def begin(self) -> None:
        self.started = True
        self.taken += 1

    @property
    def aligned(self) -> bool:
        """Whether it can be read straight into its target."""
        return not (self.offset % SECTOR or self.nbytes % SECTOR or self.target.data_ptr() % SECTOR)


def stamp_of(file: int) -> tuple[int, int]:
    """Bytes and time of change of an open file: the same as long as no process writes to it."""
    found = os.fstat(file)
    return found.st_size, found.st_mtime_ns


def sectors(nbytes: int) -> int:
    """Bytes of the whole sectors that so many take."""
    return -(-nbytes // SECTOR) * SECTOR


THREADS = 4


class DirectReader(TransferQueue[Read]):
    """Threads that read one file. Where its file system refuses direct reads they are ordinary ones, whose pages are
    given back at once, and a warning says so.

    Args:
        path: of the file, which must not change while it is read.
        threads: requests under way at a time.
        pace: bytes per second that it behaves like a disk of, at most; None: as fast as the disk is.
        handle: of the file, open, where another one may have taken its path meanwhile.
        stamp: of the file when it was found right; None: its stamp now.

    Raises:
        ExpertcastError: it cannot be opened, or the system is Windows.
    """

    def __init__(
        self, path: Path, *, threads: int = THREADS, pace: float | None = None, handle: int | None = None,
        stamp: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        if not can_read_directly():
            raise ExpertcastError("this system reads no file directly: use link 'instant', which reads it mapped")
        super().__init__()
        self.path, self._pace = path, pace
        staging = [HostMemory(PIECE + 2 * SECTOR).bytes for _ in range(threads)]  # before any thread could lack it
        self._file, self.direct = _open(path, handle)
        self._stamp = stamp or stamp_of(self._file)
        self._next_at: dict[int, Read] = {}
        """Ranges that no thread has begun, by their first byte."""
        self._paced_until = 0.0
        self.bytes_read, self.busy_s = 0, 0.0
        """So far, and the seconds in which any request was under way."""
        self._under_way, self._busy_since = 0, 0.0
        self._threads = [
            threading.Thread(target=self._run, args=(memory,), name=f"expertcast-disk-{number}", daemon=True)
            for number, memory in enumerate(staging)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, read: Read, *, front: bool = False) -> None:
        with self.lock:
            self._next_at[read.offset] = read
            super().submit(read, front=front)

    def close(self) -> None:
        """Drop what is queued, and return when nothing is being read. A second call does nothing."""
        if self._closed:
            return
        super().close()
        self._next_at.clear()
        for thread in self._threads:
            thread.join()
        os.close(self._file)

    def _run(self, staging: Tensor) -> None:
        while (request := self._next()) is not None:
            reads, piece = request
            start, nbytes = self._count(1, 0), 0
            try:
                nbytes = self._request(reads, piece, staging)
            except BaseException as error:  # handed to whoever waits for it
                if isinstance(error, OSError):
                    error = ExpertcastError(f"{str(self.path)!r} cannot be read: {error.strerror or error}")
                for read in reads:
                    read.error = error
            self._arrive(reads, start, self._count(-1, nbytes))

    def _count(self, requests: int, nbytes: int) -> float:
        """So many more are under way, and so many bytes have come; gives the time."""
        now = time.perf_counter()
        with self.lock:
            if self._under_way:
                self.busy_s += now - self._busy_since
            self._under_way += requests
            self._busy_since = now
            self.bytes_read += nbytes
        return now

    def _next(self) -> tuple[list[Read], int] | None:
        """The next request: a piece of one range, or small ranges that lie one after another."""
        with self.lock:
            read = self.take()
            return None if read is None else (self._joined(read), read.taken - 1)

    def _joined(self, read: Read) -> list[Read]:
        reads, size = [read], read.nbytes
        while read.pieces == 1 and read.aligned and size < PIECE:
            following = self._next_at.get(reads[-1].offset + reads[-1].nbytes)
            if following is None or following.started or following.cancelled:
                break
            size += following.nbytes
            if following.urgent != read.urgent or not following.aligned or size > PIECE:
                break
            following.begin()
            reads.append(following)
        return reads

    def _request(self, reads: list[Read], piece: int, staging: Tensor) -> int:
        """Read it; gives its bytes."""
        first = reads[0]
        start = piece * PIECE
        size = sum(read.nbytes for read in reads) if len(reads) > 1 else min(PIECE, first.nbytes - start)
        offset = first.offset + start
        if all(read.aligned for read in reads):
            views = [read.target.numpy().data[start : start + size] for read in reads]
            self._read(views, offset, size)
        else:
            low = offset - offset % SECTOR
            whole = sectors(offset + size - low)
            self._read([staging.numpy().data[:whole]], low, offset + size - low)
            ctypes.memmove(first.target.data_ptr() + start, staging.data_ptr() + offset - low, size)
        if self._pace is not None:
            self._keep_pace(size, self._pace)
        return size

    def _read(self, views: list[memoryview], offset: int, least: int) -> None:
        """Fill the views from one place of the file on, of which `least` bytes must be there."""
        unit, done = SECTOR if self.direct else 1, 0
        while True:
            count = os.preadv(self._file, _behind(views, done), offset + done)
            if (done + count < least and count < unit) or stamp_of(self._file) != self._stamp:
                raise ExpertcastError(
                    f"{str(self.path)!r} was changed or cut off while it was in use: load the model again"
                )
            if not self.direct and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._file, offset + done, count, os.POSIX_FADV_DONTNEED)
            if done + count >= least:
                return
            done += count - count % unit  # less than requested, as network file systems may return

    def _keep_pace(self, size: int, pace: float) -> None:
        with self.lock:
            self._paced_until = until = max(self._paced_until, time.perf_counter() - size / pace) + size / pace
        time.sleep(max(0.0, until - time.perf_counter()))

    def _arrive(self, reads: list[Read], start: float, end: float) -> None:
        for read in reads:
            with self.lock:
                read.came += 1
                read.start = min(read.start or start, start)
                last = read.came == read.pieces
            if last:
                read.finish(end)


def _behind(views: list[memoryview], done: int) -> list[memoryview]:
    """Return the rest of some views behind so many bytes."""
    left = []
    for view in views:
        left.append(view[done:])
        done = max(0, done - len(view))
    return [view for view in left if len(view)]


def can_read_directly() -> bool:
    """Whether this system reads at any place of a file without its pointer."""
    return hasattr(os, "preadv")


def _open(path: Path, handle: int | None) -> tuple[int, bool]:
    """A handle of its own, and whether it reads past the page cache."""
    # Linux opens the file itself by its handle, whatever its name leads to
    place = path if handle is None else Path(f"/proc/self/fd/{handle}")
    try:
        if hasattr(os, "O_DIRECT"):
            with contextlib.suppress(OSError):
                return os.open(place, os.O_RDONLY | os.O_DIRECT), True
        file = os.open(path, os.O_RDONLY) if handle is None else os.dup(handle)
    except OSError as error:
        raise ExpertcastError(f"cannot read {str(path)!r}: {error.strerror}") from error
    warnings.warn(
        f"the file system of {os.path.realpath(path)!r} has no direct reads: experts pass through the system's page "
        "cache",
        stacklevel=3,
    )
    return file, False
