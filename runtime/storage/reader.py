"""Reads ranges of a file into the caller's memory, bypassing the system's page cache.

Several threads read a range in pieces, since a disk is fast only with several large requests under way. Adjacent small
ranges in the queue are joined into one request. Urgent requests come first, and requests that no thread has begun can
be cancelled.
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
from expertcast.runtime.storage.layout import SECTOR, sectors
from expertcast.runtime.storage.memory import HostMemory
from expertcast.runtime.storage.transfer import Transfer, TransferQueue

# Direct reads of a file.

PIECE = 2 << 20
"""Maximum bytes of one request; larger ranges are divided among threads."""


@dataclass(slots=True, eq=False, kw_only=True)
class Read(Transfer):
    """Request that fills `target` with the bytes of the file from `offset` on."""

    target: Tensor
    """uint8, contiguous, in host memory."""
    offset: int
    """First byte in the file."""
    pieces_begun: int = 0
    """Number of pieces that a thread has begun."""
    pieces_read: int = 0
    """Number of pieces read."""

    @property
    def nbytes(self) -> int:
        """Bytes of the range."""
        return self.target.numel()

    @property
    def bytes_read(self) -> int:
        """Bytes of the file that the request reads."""
        return self.nbytes

    @property
    def pieces(self) -> int:
        """Number of pieces in which the range is read."""
        return -(-self.nbytes // PIECE)

    @property
    def waiting(self) -> bool:
        return self.pieces_begun < self.pieces and not self.cancelled

    def begin(self) -> None:
        self.started = True
        self.pieces_begun += 1

    @property
    def aligned(self) -> bool:
        """Whether offset, size and target are aligned, so that a direct read can fill the target."""
        return not (self.offset % SECTOR or self.nbytes % SECTOR or self.target.data_ptr() % SECTOR)


def stamp_of(file: int) -> tuple[int, int]:
    """Return size in bytes and modification time in nanoseconds of an open file; they change when it is written."""
    found = os.fstat(file)
    return found.st_size, found.st_mtime_ns


THREADS = 4
"""Default number of threads of a reader."""


class DirectReader(TransferQueue[Read]):
    """Queue and threads that read one file.

    If the file system has no direct reads, a warning says so; then ordinary reads drop their pages at once.

    Args:
        path: path of the file, which must not change while it is read.
        threads: number of concurrent requests.
        pace: limit of the rate in bytes per second, to emulate a slower disk; None: no limit.
        handle: open descriptor of the file, if another file may have replaced it at `path`.
        stamp: expected :func:`stamp_of` the file; None: its stamp now.

    Raises:
        ExpertcastError: the file cannot be opened, or the system has no positioned reads (Windows).
    """

    def __init__(
        self, path: Path, *, threads: int = THREADS, pace: float | None = None, handle: int | None = None,
        stamp: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        if not can_read_directly():
            raise ExpertcastError("this system reads no file directly: use link 'instant', which reads it mapped")
        super().__init__()
        self.path, self._pace = path, pace
        staging = [HostMemory(PIECE + 2 * SECTOR).bytes for _ in range(threads)]  # before any thread: it may fail
        self._file, self.direct = _open(path, handle)
        self._stamp = stamp or stamp_of(self._file)
        self._next_at: dict[int, Read] = {}
        """Submitted ranges by their offset; :meth:`_joined` skips those that have begun."""
        self._paced_until = 0.0
        self.bytes_read, self.busy_s = 0, 0.0
        """Bytes read so far, and the seconds in which any request was under way."""
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
        """Empty the queue, wait for the requests that have begun, and close the file. A second call does nothing."""
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
            except BaseException as error:  # raised in the threads that wait for the ranges
                if isinstance(error, OSError):
                    error = ExpertcastError(f"{str(self.path)!r} cannot be read: {error.strerror or error}")
                for read in reads:
                    read.error = error
            self._arrive(reads, start, self._count(-1, nbytes))

    def _count(self, requests: int, nbytes: int) -> float:
        """Change the number of requests under way by `requests` and add `nbytes` read. Returns the clock time."""
        now = time.perf_counter()
        with self.lock:
            if self._under_way:
                self.busy_s += now - self._busy_since
            self._under_way += requests
            self._busy_since = now
            self.bytes_read += nbytes
        return now

    def _next(self) -> tuple[list[Read], int] | None:
        """Wait for the next request: adjacent small ranges, or one range and the number of its piece."""
        with self.lock:
            read = self.take()
            return None if read is None else (self._joined(read), read.pieces_begun - 1)

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
        """Read one request and return its bytes."""
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
        """Fill the views from `offset` of the file on. The file must have `least` bytes there."""
        unit, done = SECTOR if self.direct else 1, 0
        while True:
            count = os.preadv(self._file, _behind(views, done), offset + done)
            if (done + count < least and count < unit) or stamp_of(self._file) != self._stamp:
                raise ExpertcastError(
                    f"{str(self.path)!r} was changed or truncated while it was in use: load the model again"
                )
            if not self.direct and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._file, offset + done, count, os.POSIX_FADV_DONTNEED)
            if done + count >= least:
                return
            done += count - count % unit  # network file systems may return less than requested

    def _keep_pace(self, size: int, pace: float) -> None:
        with self.lock:
            self._paced_until = until = max(self._paced_until, time.perf_counter() - size / pace) + size / pace
        time.sleep(max(0.0, until - time.perf_counter()))

    def _arrive(self, reads: list[Read], start: float, end: float) -> None:
        for read in reads:
            with self.lock:
                read.pieces_read += 1
                read.start = min(read.start or start, start)
                last = read.pieces_read == read.pieces
            if last:
                read.finish(end)


def _behind(views: list[memoryview], done: int) -> list[memoryview]:
    """Return the views without their first `done` bytes in all."""
    left = []
    for view in views:
        left.append(view[done:])
        done = max(0, done - len(view))
    return [view for view in left if len(view)]


def can_read_directly() -> bool:
    """Whether the system has `preadv`, a read at an offset into several buffers."""
    return hasattr(os, "preadv")


def _open(path: Path, handle: int | None) -> tuple[int, bool]:
    """Open the file and return the descriptor and whether its reads are direct."""
    # on Linux this path opens the file of the handle, even if another one replaced it at `path`
    place = path if handle is None else Path(f"/proc/self/fd/{handle}")
    try:
        if hasattr(os, "O_DIRECT"):
            with contextlib.suppress(OSError):
                return os.open(place, os.O_RDONLY | os.O_DIRECT), True
        file = os.open(path, os.O_RDONLY) if handle is None else os.dup(handle)
    except OSError as error:
        raise ExpertcastError(f"cannot read {str(path)!r}: {error.strerror}") from error
    warnings.warn(
        f"the file system of {os.path.realpath(path)!r} has no direct reads: experts are read through the system's "
        "page cache",
        stacklevel=3,
    )
    return file, False
