"""A function in a fork of this process: with its imports, apart from its state, within limits, and to be killed.

The process that forks runs no tensor operation itself: threads that those start would not be there in the fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_IMPORTS = ("cli", "commands.collect", "commands.eval", "commands.generate", "commands.inspect", "commands.simulate",
            "commands.train", "training.estimator", "training.next_token", "runtime.loading")  # fmt: skip
_TIMED_OUT = "Timeout ("
_RAISED = 70
"""Exit status after an exception; sysexits.h's for an error in the program."""


def prepare() -> None:
    """Before the first fork: import what the commands need, once for all forks."""
    for module in _IMPORTS:
        importlib.import_module(f"expertcast.{module}")
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page that holds an object


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the fork may take."""

    seconds: float = 30.0
    """It is ended after these, with a traceback of where it was."""
    memory: int | None = None
    """Bytes of addresses beyond those that it starts with."""
    file_bytes: int | None = None
    """Size of a file: writing beyond fails as on a full disk, with another reason."""
    user: int | None = None
    """Whom it runs as, in place of root, who may write anywhere."""
    by_mode: bool = False
    """Whether files' modes hold for root too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a fork ended."""

    status: int
    """Exit status, negative for a signal."""
    out: str
    err: str
    seconds: float

    @property
    def hung(self) -> bool:
        """Whether it was ended for its time."""
        return _TIMED_OUT in self.err

    @property
    def raised(self) -> bool:
        """Whether an exception came through, or a signal ended it."""
        return self.status == _RAISED or self.status < 0


def run(work: Callable[[], int], folder: Path, limits: Limits, kill_after: float | None = None) -> Ended:
    """Run it to its end, or to its kill.

    Args:
        work: gives the exit status.
        folder: what it prints is kept there, in `out` and `err`.
        limits: see there.
        kill_after: seconds after which it is sent SIGKILL.
    """
    wait, child = start(work, folder, limits)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)  # nobody else waits for it: the number is still its own
    return wait()


def start(work: Callable[[], int], folder: Path, limits: Limits) -> tuple[Callable[[], Ended], int]:
    """Begin; gives what waits for the end, and the process's number."""
    sys.stdout.flush()
    sys.stderr.flush()
    for name in ("out", "err"):
        (folder / name).unlink(missing_ok=True)  # what is read there is this fork's
    begin = time.monotonic()
    child = os.fork()
    if child == 0:
        _child(work, folder, limits)

    def wait() -> Ended:
        _, status = os.waitpid(child, 0)
        out, err = ((folder / name).read_text(errors="replace") for name in ("out", "err"))
        return Ended(status=os.waitstatus_to_exitcode(status), out=out, err=err, seconds=time.monotonic() - begin)

    return wait, child


def call(work: Callable[[], object], folder: Path) -> object:
    """What a function gives back, by way of JSON.

    Raises:
        RuntimeError: it raised.
    """
    result = folder / "result.json"

    def written() -> int:
        result.write_text(json.dumps(work()))
        return 0

    ended = run(written, folder, Limits(seconds=600.0))
    if ended.status:
        raise RuntimeError(f"exit status {ended.status}: {ended.err[-3000:]}")
    return json.loads(result.read_text())


def _child(work: Callable[[], int], folder: Path, limits: Limits) -> None:
    status = _RAISED
    try:
        for name, number in (("out", 1), ("err", 2)):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
        faulthandler.dump_traceback_later(limits.seconds, exit=True, file=2)
        _limit(limits)
        status = work()
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _limit(limits: Limits) -> None:
    if limits.memory is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + limits.memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    if limits.file_bytes is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file_bytes, limits.file_bytes))
    if limits.user is not None:
        os.setuid(limits.user)
    if limits.by_mode and os.getuid() == 0:
        _drop_override()


def _drop_override() -> None:
    """Give up the capabilities by which root reads and writes what modes forbid (Linux)."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this process
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, twice 32 bits
    if libc.capget(header, sets):
        raise OSError(ctypes.get_errno(), "capget")
    for index in range(3):
        sets[index] &= ~(1 << 1 | 1 << 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    if libc.capset(header, sets):
        raise OSError(ctypes.get_errno(), "capset")
