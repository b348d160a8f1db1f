"""One process at a time writes a folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from expertcast.data.distributed import join_ranks
from expertcast.predictors.errors import ExpertcastError

try:
    import fcntl
except ImportError:  # a system without it
    fcntl = None  # type: ignore[assignment]


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Nobody else who asks writes `folder` meanwhile, which is made; a kill gives it back. Under torchrun the first
    rank asks for all of them.

    Raises:
        ExpertcastError: another process is at it.
    """
    if fcntl is None or join_ranks().rank != 0 or (folder.exists() and not folder.is_dir()):
        yield  # whatever is wrong with the folder is said by who writes it
        return
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)  # the lock is the folder's own: no file is left behind
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ExpertcastError(f"another process is writing {folder}: wait for it, or name another folder") from None
        yield
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            for path in made:
                path.rmdir()  # where nothing was written
