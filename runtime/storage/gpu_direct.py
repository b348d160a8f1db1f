"""Reads experts from a raw store's file straight into a GPU's memory: GPUDirect Storage, through kvikio.

Where the system has none kvikio itself goes through host memory. Written after the documentation of kvikio 26.10
(`CuFile.pread`) and never run on a GPU.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.storage.direct_read import Read


def load_kvikio() -> Any:
    """The package; raises ExpertcastError where it is not installed, or lacks libraries."""
    try:
        return importlib.import_module("kvikio")
    except Exception as error:  # it loads libraries of its own, which raise what they like
        why = str(error).partition("\n")[0]
        raise ExpertcastError(
            f"link 'gpudirect' needs kvikio ({why}): install kvikio-cu12 or kvikio-cu13, or use link='disk'"
        ) from error


class GpuDirectReader:
    """A :class:`expertcast.runtime.storage.arrival.Reader`; each of its threads has one expert under way.

    `free` is called in them before a read begins, and returns when nothing uses its target any more.

    Raises:
        ExpertcastError: as :func:`load_kvikio`, or the file cannot be opened.
    """

    def __init__(self, path: Path, threads: int, free: Callable[[Read], None]) -> None:
        self._path, self._free = path, free
        try:
            self._file, self._size = load_kvikio().CuFile(path, "r"), path.stat().st_size
        except (OSError, RuntimeError) as error:
            raise ExpertcastError(f"cannot read {str(path)!r} by GPUDirect: {error}") from error
        self._queue: list[Read] = []
        self._changed, self._closed = threading.Condition(), False
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, read: Read) -> None:
        read.expect()
        with self._changed:
            self._queue.append(read)
            self._changed.notify()

    def promote(self, read: Read) -> None:
        read.urgent = True

    def cancel(self, read: Read) -> bool:
        with self._changed:
            read.cancelled = read in self._queue
            if read.cancelled:
                self._queue.remove(read)
            return read.cancelled

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._file.close()

    def _run(self) -> None:
        while (read := self._take()) is not None:
            try:
                self._free(read)
                read.start = time.perf_counter()
                count = self._file.pread(read.target, read.nbytes, read.offset).get()
                if count != read.nbytes or self._path.stat().st_size != self._size:
                    raise OSError("it was cut off or changed while it was in use: load the model again")
            except Exception as error:  # handed to whoever waits for it
                read.error = ExpertcastError(f"{str(self._path)!r} cannot be read by GPUDirect: {error}")
            read.arrive(time.perf_counter())

    def _take(self) -> Read | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            if not self._queue:
                return None
            read = min(self._queue, key=lambda queued: queued.rank)
            self._queue.remove(read)
            return read
