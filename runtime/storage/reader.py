"""Reads ranges of files into the caller's memory, bypassing the system's page cache.

Several threads read a range in pieces, since a disk is fast only with several large requests under way. Adjacent small
ranges in the queue are joined into one request. Urgent requests come first, and requests that no thread has begun can
be cancelled.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from expertcast.data.machine import run_alone
from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.storage.layout import SECTOR, sectors
from expertcast.runtime.storage.memory import HostMemory
from expertcast.runtime.storage.transfer import Transfer, TransferQueue

# Direct reads of a file.

PIECE = 2 << 20
"""Maximum bytes of one request; larger ranges are divided among threads."""


class Range(NamedTuple):
    """Range of a file that is read to a place in memory."""

    offset: int
    """First byte in the file."""
    start: int
    """First byte in memory."""
    nbytes: int
    file: int = 0
    """Number of the file among those of the reader."""
    unit: int = 1
    """Bytes of which a piece has a multiple, at most `PIECE`."""
    write: Callable[[int, int, int], None] | None = None
    """Writes a piece's bytes from an address to another in another order, with their number; None: they are copied."""

    def put(self, given: int, memory: Tensor) -> None:
        """Write the range's bytes from an address to their place in memory, uint8."""
        assert self.start + self.nbytes <= memory.numel()
        place = memory.data_ptr() + self.start
        if self.write is None:
            ctypes.memmove(place, given, self.nbytes)
        else:
            self.write(given, place, self.nbytes)


def pieces_of(ranges: Iterable[Range]) -> list[Range]:
    """Divide ranges into pieces of at most `PIECE` bytes."""
    pieces = []
    for each in ranges:
        step = PIECE // each.unit * each.unit
        if 0 < each.nbytes <= step:
            pieces.append(each)
            continue
        for done in range(0, each.nbytes, step):
            left = min(step, each.nbytes - done)
            pieces.append(each._replace(offset=each.offset + done, start=each.start + done, nbytes=left))
    return pieces


@dataclass(eq=False, kw_only=True)
class Read(Transfer):
    """Request that fills `target` with the bytes of a file from `offset` on, or with several ranges of files."""

    target: Tensor
    """uint8, contiguous, in host memory."""
    offset: int = -1
    """First byte in the file; -1: the ranges are given."""
    pieces: list[Range] = field(default_factory=list)
    """Result of :func:`pieces_of`."""
    pieces_begun: int = 0
    """Number of pieces that a thread has begun."""
    pieces_read: int = 0
    """Number of pieces read."""

    def __post_init__(self) -> None:
        self.pieces = self.pieces or pieces_of([Range(self.offset, 0, self.target.numel())])

    @property
    def memory(self) -> Tensor:
        """Memory that the ranges are read into, uint8."""
        return self.target

    @property
    def nbytes(self) -> int:
        """Bytes of all ranges."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def bytes_read(self) -> int:
        """Bytes of the files that the request reads."""
        return self.nbytes

    @property
    def waiting(self) -> bool:
        return self.pieces_begun < len(self.pieces) and not self.cancelled

    def begin(self) -> None:
        self.started = True
        self.pieces_begun += 1

    def aligned(self, piece: Range) -> bool:
        """Whether offset, size and memory of a piece are aligned, so that a direct read can fill the memory."""
        return piece.write is None and not (
            piece.offset % SECTOR or piece.nbytes % SECTOR or (self.memory.data_ptr() + piece.start) % SECTOR
        )


@dataclass(eq=False, kw_only=True)
class ConvertedRead(Read):
    """Request that reads ranges into memory of its own, and converts them to `target` in the reader's thread."""

    convert: Callable[[Tensor, Tensor], None]
    """Called with the ranges' bytes and `target`."""
    own: Tensor | None = None

    @property
    def memory(self) -> Tensor:
        assert self.own is not None
        return self.own

    def begin(self) -> None:
        Read.begin(self)
        if self.own is None:
            self.own = HostMemory(max(piece.start + piece.nbytes for piece in self.pieces)).bytes

    def finish(self, end: float, error: BaseException | None = None) -> None:
        error = self.error or error
        try:
            if error is None:
                self.convert(self.memory, self.target)
                end = time.perf_counter()
        except BaseException as raised:  # raised in the threads that wait for the expert
            error = raised
        finally:
            self.own = None
            Read.finish(self, end, error)


def stamp_of(file: int) -> tuple[int, int]:
    """Return size in bytes and modification time in nanoseconds of an open file; they change when it is written."""
    found = os.fstat(file)
    return found.st_size, found.st_mtime_ns


THREADS = 4
"""Default number of threads of a reader."""
HANDLES = Path("/dev/fd")
"""Folder in which a process finds its open files by descriptor, including those without a name."""


def shown(path: Path) -> str:
    """Return how messages name a file."""
    return f"the temporary store in {tempfile.gettempdir()!r}" if path.parent == HANDLES else repr(str(path))


class OpenFile(NamedTuple):
    """A file that must not change while it is read."""

    path: Path
    handle: int | None = None
    """Open descriptor of the file, if another file may have replaced it at `path`."""
    stamp: tuple[int, int] | None = None
    """Expected :func:`stamp_of` the file; None: its stamp when the reader is created."""

    def changed(self) -> ExpertcastError:
        """Return the error for a file that has changed."""
        return ExpertcastError(f"{shown(self.path)} was changed or truncated while it was in use: load the model again")


class DirectReader(TransferQueue[Read]):
    """Queue and threads that read some files.

    If the file system has no direct reads, a warning says so; then ordinary reads drop their pages at once.

    Args:
        files: the files, or their paths.
        threads: number of concurrent requests.
        pace: limit of the rate in bytes per second, to emulate a slower disk; None: no limit.

    Raises:
        ExpertcastError: a file cannot be opened.
    """

    def __init__(self, *files: OpenFile | Path, threads: int = THREADS, pace: float | None = None) -> None:
        super().__init__()
        self._pace = pace
        staging = [HostMemory(PIECE + 2 * SECTOR).bytes for _ in range(threads)]  # before any thread: it may fail
        self.direct = True
        """Whether reads bypass the page cache."""
        self._files: list[OpenFile] = []
        """The files, with descriptors of this reader."""
        for file in files:
            self._add(file if isinstance(file, OpenFile) else OpenFile(file))
        self._next_at: dict[int, Read] = {}
        """Submitted reads of one range by its offset; :meth:`_joined` skips those that have begun. Emptied when no read
        is queued."""
        self._paced_until = 0.0
        self._threads = [
            threading.Thread(target=self._run, args=(memory,), name=f"expertcast-disk-{number}", daemon=True)
            for number, memory in enumerate(staging)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, read: Read, *, front: bool = False) -> None:
        with self.lock:
            if self.first() is None:
                self._next_at.clear()
            if read.offset >= 0:
                self._next_at[read.offset] = read
            super().submit(read, front=front)

    def close(self) -> None:
        """Empty the queue, wait for the requests that have begun, and close the files. A second call does nothing."""
        if self._closed:
            return
        super().close()
        self._next_at.clear()
        for thread in self._threads:
            thread.join()
        self._close_files()

    def _add(self, file: OpenFile) -> None:
        try:
            handle, direct = _open(file)
        except BaseException:
            self._close_files()
            raise
        self.direct = self.direct and direct
        self._files.append(OpenFile(file.path, handle, file.stamp or stamp_of(handle)))

    def _close_files(self) -> None:
        for file in self._files:
            assert file.handle is not None
            os.close(file.handle)

    def _run(self, memory: Tensor) -> None:
        run_alone()
        staging = memory.numpy().data
        while (request := self._next()) is not None:
            reads, piece = request
            start = time.perf_counter()
            try:
                self._request(reads, piece, staging, memory.data_ptr())
            except BaseException as error:  # raised in the threads that wait for the ranges
                if isinstance(error, OSError):
                    path = self._files[reads[0].pieces[piece].file].path
                    error = ExpertcastError(f"{shown(path)} cannot be read: {error.strerror or error}")
                for read in reads:
                    read.error = error
            self._arrive(reads, start, time.perf_counter())

    def _next(self) -> tuple[list[Read], int] | None:
        """Wait for the next request: adjacent small ranges, or one range and the number of its piece."""
        with self.lock:
            read = self.take()
            return None if read is None else (self._joined(read), read.pieces_begun - 1)

    def _joined(self, read: Read) -> list[Read]:
        reads, size = [read], read.pieces[0].nbytes
        while len(read.pieces) == 1 and read.aligned(read.pieces[0]) and size < PIECE:
            following = self._next_at.get(reads[-1].offset + reads[-1].nbytes)
            if following is None or following.started or following.cancelled:
                break
            size += following.nbytes
            if following.urgent != read.urgent or not following.aligned(following.pieces[0]) or size > PIECE:
                break
            following.begin()
            reads.append(following)
        return reads

    def _request(self, reads: list[Read], number: int, staging: memoryview, address: int) -> None:
        """Read one request, directly or by memory at an address."""
        first, piece = reads[0], reads[0].pieces[number]
        size = sum(read.nbytes for read in reads) if len(reads) > 1 else piece.nbytes
        file, offset = self._files[piece.file], piece.offset
        if first.aligned(piece):  # then the adjacent ones are, too
            views = [read.memory.numpy().data[piece.start : piece.start + size] for read in reads]
            self._read(file, views, offset, size)
        else:
            low = offset - offset % SECTOR
            whole = sectors(offset + size - low)
            self._read(file, [staging[:whole]], low, offset + size - low)
            piece.put(address + offset - low, first.memory)
        if self._pace is not None:
            seconds = size / self._pace
            with self.lock:
                self._paced_until = until = max(self._paced_until, time.perf_counter() - seconds) + seconds
            time.sleep(max(0.0, until - time.perf_counter()))

    def _read(self, file: OpenFile, views: list[memoryview], offset: int, least: int) -> None:
        """Fill the views from `offset` of the file on. The file must have `least` bytes there."""
        assert file.handle is not None
        unit, done = SECTOR if self.direct else 1, 0
        while True:
            count = os.preadv(file.handle, _behind(views, done) if done else views, offset + done)
            if done + count < least and count < unit:
                raise file.changed()
            if not self.direct and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.handle, offset + done, count, os.POSIX_FADV_DONTNEED)
            if done + count >= least:
                return
            done += count - count % unit  # network file systems may return less than requested

    def _arrive(self, reads: list[Read], start: float, end: float) -> None:
        with self.lock:
            for read in reads:
                read.pieces_read += 1
                read.start = min(read.start or start, start)
            over = [read for read in reads if read.pieces_read == len(read.pieces)]
        changed = self._changed(over[0]) if over else None  # joined ones are of one file
        for read in over:
            read.finish(end, changed)

    def _changed(self, read: Read) -> ExpertcastError | None:
        """Return an error if a file of a request, all of whose pieces are read, has changed meanwhile."""
        for number in {piece.file for piece in read.pieces}:
            file = self._files[number]
            assert file.handle is not None
            if stamp_of(file.handle) != file.stamp:
                return file.changed()
        return None


def _behind(views: list[memoryview], done: int) -> list[memoryview]:
    """Return the views without their first `done` bytes in all."""
    left = []
    for view in views:
        left.append(view[done:])
        done = max(0, done - len(view))
    return [view for view in left if len(view)]


def _open(file: OpenFile) -> tuple[int, bool]:
    """Open a file and return the descriptor and whether its reads are direct."""
    path, handle, _ = file
    # on Linux this path opens the file of the handle, even if another one replaced it at `path`
    place = path if handle is None else Path(f"/proc/self/fd/{handle}")
    try:
        if hasattr(os, "O_DIRECT"):
            with contextlib.suppress(OSError):
                return os.open(place, os.O_RDONLY | os.O_DIRECT), True
        opened = os.open(path, os.O_RDONLY) if handle is None else os.dup(handle)
    except OSError as error:
        raise ExpertcastError(f"cannot read {shown(path)}: {error.strerror}") from error
    warnings.warn(
        f"the file system of {os.path.realpath(path)!r} has no direct reads: experts are read through the system's "
        "page cache",
        stacklevel=3,
    )
    return opened, False
