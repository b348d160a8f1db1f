"""A store's file while it is written: beside its place under another name, or without any name at all.

What a killed process leaves is of no use and as large as the model. A file without a name leaves nothing; one that
will have a name is locked while it is written, and removed by the next process that packs into its folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import tempfile
import weakref
from pathlib import Path
from typing import BinaryIO

from expertcast.predictors.artefacts import open_file

PARTIAL = ".partial"
_HANDLES = Path("/proc/self/fd")
_NUMBER = itertools.count()


class Draft:
    """Where a file is written.

    Args:
        path: that it gets when it is complete. None: it has no name, is in the system's folder for temporary files, and
            is gone when no process has it open or mapped any more, however that ends
            (where :func:`can_be_nameless`).
    """

    def __init__(self, path: Path | None) -> None:
        self._target = path
        self.folder = Path(tempfile.gettempdir()) if path is None else path.parent
        self.path = self.folder if path is None else path
        """Where it is found, once it is open: a nameless one by this process, as long as the draft is held."""
        self._file: BinaryIO | None = None

    def open(self) -> BinaryIO:
        """Make it, empty; to be written and read.

        Raises:
            OSError: the folder cannot be written.
        """
        if self._target is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed by drop)
            self.path = _HANDLES / str(self._file.fileno())
            weakref.finalize(self, self._file.close)
            return self._file
        self.folder.mkdir(parents=True, exist_ok=True)
        _remove_left_over(self._target)
        self.path = self._target.with_name(f"{self._target.name}.{os.getpid()}-{next(_NUMBER)}{PARTIAL}")
        self._file = self.path.open("w+b")
        weakref.finalize(self, self._file.close)
        _lock(self._file.fileno())  # as long as anything has it open or mapped
        return self._file

    def commit(self) -> None:
        """It is complete: give it its name.

        Raises:
            OSError: the system does not.
        """
        if self._target is not None:
            assert self._file is not None, "it was not opened"
            self._file.close()
            os.replace(self.path, self._target)
            self.path = self._target

    def drop(self) -> None:
        """Let go of it, and remove it unless it has its name."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # what was not written yet finds no room
                self._file.close()
            if self._target not in (None, self.path):
                with contextlib.suppress(OSError):
                    self.path.unlink()


def can_be_nameless() -> bool:
    """Whether this system opens a file without a name again, by the handle that a process has of it."""
    return _HANDLES.is_dir()


def _lock(descriptor: int) -> bool:
    """Whether nobody else has the file: a process that was killed has it no more."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_left_over(path: Path) -> None:
    """Remove what processes that were killed while they packed have left."""
    for partial in path.parent.glob(f"{path.name}.*{PARTIAL}"):
        with contextlib.suppress(OSError), open_file(partial) as file:
            if partial.stat().st_size and _lock(file.fileno()):  # an empty one is about to be locked
                partial.unlink()
