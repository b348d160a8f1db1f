"""What may stand in the place of a file and is none: reading it must end."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        here = os.getcwd()
        os.chdir(path.parent)  # its address has room for 108 characters
        try:
            bound.bind(path.name)
        finally:
            os.chdir(here)


IRREGULAR: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "socket": _socket,
    "folder": Path.mkdir,
    "link to itself": lambda path: path.symlink_to(path),
}


def put(kind: str, path: Path) -> None:
    """Put one of `IRREGULAR` in the place of a file."""
    path.unlink(missing_ok=True)
    IRREGULAR[kind](path)


@contextmanager
def in_seconds(limit: int) -> Iterator[None]:
    """Fails where what is done takes longer."""

    def end(*_: object) -> None:
        raise AssertionError(f"it did not end in {limit} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(limit)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
