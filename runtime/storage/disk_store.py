"""The experts of a model in a mapped file, for models larger than memory.

The system's file cache is the memory: what is copied often stays in it, what is forecast is read ahead by a thread.

L MoE layers, E routed experts per layer. An expert's key is layer * E + expert.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.storage.arrival import Reader
from expertcast.runtime.storage.direct_read import Read
from expertcast.runtime.storage.direct_reader import DirectReader
from expertcast.runtime.storage.file_store import FileStore
from expertcast.runtime.storage.store import Write
from expertcast.runtime.storage.store_file import FILE_NAME, StoreFile
from expertcast.runtime.storage.store_header import read_header

_MADV_WILLNEED = 3
_MADV_POPULATE_READ = 22
"""Linux 5.14 and later: read and map the pages, and return when they are there."""


class DiskStore(FileStore):
    """Blocks as they are, in a file (:mod:`expertcast.runtime.storage.store_file`) that is mapped, or read directly.

    Raises:
        ExpertcastError: the folder holds a file of that name that is not ours.
    """

    file_name = FILE_NAME

    def _begin(self) -> None:
        self._file: StoreFile | None = None
        self._ahead: ReadAhead | None = None

    def _check(self) -> None:
        read_header(self.path)

    def _open(self) -> None:
        self._use(StoreFile.open(self.path, self._form))

    def _use(self, file: StoreFile) -> None:
        self._file = file
        for layer in range(self.layers):
            self._hold(layer, file.layer(layer))
        self._ahead = ReadAhead()
        weakref.finalize(self, self._ahead.close)

    def fill(self, layer: int, write: Write) -> None:
        if self._file is None or self._ahead is not None:
            self._drop()
            self._file = StoreFile.create(self._new_draft(), self._form)
        self._hold(layer, self._file.layer(layer))
        write(self.views(layer))
        self._file.close_layer(layer)

    def finish(self) -> None:
        """Give the file its name, and use it so that nothing can be written to it any more."""
        assert self._file is not None
        complete = self._file.commit()
        self.path = complete.path
        self._use(complete)

    def views(self, layer: int) -> dict[str, Tensor]:
        """One layer's parameters in the mapped file.

        Raises:
            ExpertcastError: the file is shorter than it was: touching what it lacks would kill the process.
        """
        if self._file is not None and self._file.cut_off():
            raise ExpertcastError(f"{str(self.path)!r} was cut off while it was in use: load the model again")
        return super().views(layer)

    @property
    def handle(self) -> int:
        """Of the file, open as long as the store is."""
        assert self._file is not None
        return self._file.handle

    def reader(self, threads: int, pace: float | None) -> Reader:
        assert self._file is not None
        self._file.forget()
        self._file.drop_cached()
        return DirectReader(self.path, threads=threads, pace=pace, handle=self._file.handle, stamp=self._file.stamp)

    def read(self, key: int, block: Tensor, arrival: Callable[[Any], None], urgent: bool) -> Read:
        assert self._file is not None
        layer, expert = divmod(key, self.experts)
        return Read(block, arrival, urgent, offset=self._file.offset(layer) + expert * self.layout.block_bytes)

    def read_ahead(self, keys: Iterable[int]) -> None:
        """Read these experts' pages in a thread, in the order in which they are asked for."""
        if self._ahead is not None:
            size = self.layout.block_bytes
            self._ahead.ask((block.data_ptr(), size) for key in keys if (block := self._blocks[key]) is not None)

    def _drop(self) -> None:
        """Stop reading, and remove a file that was not completed."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        if self._file is not None and self._file.draft is not None:
            self._file.draft.drop()
        self._file = None


class ReadAhead:
    """A thread that brings ranges of mapped files into memory."""

    def __init__(self, limit: int = 256) -> None:
        self._queue: deque[tuple[int, int]] = deque(maxlen=limit)
        """(pointer, bytes); a full queue forgets what was asked for first."""
        self._changed = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="expertcast-read-ahead", daemon=True)
        self._thread.start()
        self.ranges_read = 0

    def ask(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Read these ranges (pointer, bytes) next, after those that were asked for before."""
        self._queue.extend(ranges)
        self._changed.set()

    def close(self) -> None:
        """Return when nothing is being read: the mapping may go then."""
        self._closed = True
        self._queue.clear()
        self._changed.set()
        if threading.current_thread() is not self._thread:  # where garbage may be collected too
            self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            self._changed.wait()
            self._changed.clear()
            while self._queue and not self._closed:
                try:
                    pointer, size = self._queue.popleft()
                except IndexError:  # cleared meanwhile
                    break
                populate(pointer, size)
                self.ranges_read += 1


def populate(pointer: int, size: int) -> None:
    """Bring the pages that hold these bytes into memory; on older systems, ask for them and return."""
    start = pointer - pointer % mmap.PAGESIZE
    length = pointer + size - start
    advise = ctypes.CDLL(None).madvise  # with the interpreter's lock released, as mmap.madvise is not
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if sys.platform != "linux" or advise(start, length, _MADV_POPULATE_READ) != 0:
        advise(start, length, _MADV_WILLNEED)
