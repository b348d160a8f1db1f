"""Runs a module in a child process with limits: memory by a control group, the disk's rate by block-I/O throttling, and
a cold page cache.

Both are control groups of version 1, made below the group that this process is in and removed afterwards. Where there
are none, or no right to make any, a run goes on without, and its result says so.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

from expertcast.predictors.messages import Json

_PREFIX = "bench-disk-"
_REMOVALS = 50
"""Tries, a tenth of a second each: a group is busy for a moment after its last process."""


class Cage:
    """The groups of one run; a context manager.

    Args:
        memory: bytes; None: no limit, but the memory is counted.
        folder: whose disk is throttled.
    """

    def __init__(self, memory: int | None, folder: Path) -> None:
        self._memory, self._disk = _made("memory"), _made("blkio")
        self._device = _disk_of(folder)
        self.capped = False
        if self._memory is not None and memory is not None:
            self.capped = _written(self._memory / "memory.limit_in_bytes", str(memory))
            # what a swap device takes would be memory that nobody counts
            _written(self._memory / "memory.swappiness", "0")

    def __enter__(self) -> Cage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for group in self._groups:
            for _ in range(_REMOVALS):
                with suppress(OSError):
                    group.rmdir()
                    break
                time.sleep(0.1)

    @property
    def groups(self) -> list[str]:
        """Folders that a process joins by writing to their `cgroup.procs`."""
        return [str(group) for group in self._groups]

    def throttle(self, rate: float) -> bool:
        """Let the disk give at most so many bytes per second from now on. False: it cannot be."""
        return (
            self._disk is not None
            and self._device is not None
            and _written(self._disk / "blkio.throttle.read_bps_device", f"{self._device} {int(rate)}")
        )

    def forget_peak(self) -> None:
        """Count the peak from now on."""
        if self._memory is not None:
            _written(self._memory / "memory.max_usage_in_bytes", "0")

    @property
    def peak(self) -> int | None:
        """Most bytes since then, pages of files with them; None: not known."""
        if self._memory is None:
            return None
        return int((self._memory / "memory.max_usage_in_bytes").read_text())

    @property
    def _groups(self) -> list[Path]:
        return [group for group in (self._memory, self._disk) if group is not None]


def drop_cached(folders: Iterable[Path]) -> None:
    """Have the system drop the pages of all files in some folders, as far as no process has them mapped."""
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())  # pages that are not written yet cannot be dropped
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _made(controller: str) -> Path | None:
    """A new group of a controller, below this process's own; None: there cannot be one."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, own = line.split(":", 2)
            mount = _mount(controller)
            if controller in controllers.split(",") and mount is not None:
                group = mount / own.lstrip("/") / f"{_PREFIX}{os.getpid()}"
                group.mkdir(exist_ok=True)
                return group
    return None


def _mount(controller: str) -> Path | None:
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, kind, options, *_ = line.split()
        if kind == "cgroup" and controller in options.split(","):
            return Path(place)
    return None


def _disk_of(folder: Path) -> str | None:
    """`major:minor` of the whole disk that a folder lies on."""
    device = folder.stat().st_dev
    place = Path("/sys/dev/block") / f"{os.major(device)}:{os.minor(device)}"
    if not place.exists():
        return None
    if (place / "partition").exists():
        place = place.resolve().parent
    return (place / "dev").read_text().strip()


def _written(path: Path, text: str) -> bool:
    try:
        path.write_text(text)
    except OSError:
        return False
    return True


ROOT = Path(__file__).resolve().parents[1]
_MOST_SECONDS = 3600


def run(
    module: str,
    spec: Json,
    *,
    folder: Path,
    memory: int | None = None,
    rate: float | None = None,
    cold: Iterable[Path] = (),
    python: str = sys.executable,
) -> Json:
    """One run.

    Args:
        module: that the process runs.
        spec: what it reads.
        folder: on the disk that is throttled.
        memory: bytes that it and the pages of its files may take; None: no limit.
        rate: bytes per second that the disk gives from when it has loaded; None: as it is.
        cold: folders whose files are not in the page cache when it starts, and again when it has loaded.
        python: interpreter of the process.

    Returns:
        What the process found, `peak_bytes`, `capped` and `throttled`; or `failed`, with the reason.
    """
    cold = list(cold)
    with tempfile.TemporaryDirectory(prefix="bench-disk-") as temporary, Cage(memory, folder) as cage:
        out, errors = Path(temporary) / "out.json", Path(temporary) / "errors"
        written = Path(temporary) / "spec.json"
        written.write_text(json.dumps({**spec, "groups": cage.groups, "out": str(out)}))
        drop_cached(cold)
        with errors.open("w") as log, subprocess.Popen(
            [python, "-m", module, str(written)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            text=True, env=environment(),
        ) as process, ExitStack() as stack:  # fmt: skip
            assert process.stdin is not None
            assert process.stdout is not None
            stack.callback(process.kill)  # does nothing to one that has ended
            throttled = False
            if any(line == "ready\n" for line in iter(process.stdout.readline, "")):
                drop_cached(cold)
                throttled = rate is not None and cage.throttle(rate)
                cage.forget_peak()
                with suppress(BrokenPipeError):  # it has died: why is in its errors
                    process.stdin.write("go\n")
                    process.stdin.flush()
            try:
                process.communicate(timeout=_MOST_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
        if process.returncode or not out.is_file():
            return {"failed": _reason(process.returncode, errors.read_text(errors="replace"), cage.capped)}
        found = json.loads(out.read_text())
        peak = cage.peak
        found["peak_bytes"] = found["peak_resident_bytes"] if peak is None else peak
        return {**found, "capped": cage.capped, "throttled": throttled}


def abilities(folder: Path) -> Json:
    """Whether memory can be `capped` and the disk `throttled` here."""
    with Cage(1 << 40, folder) as cage:
        return {"capped": cage.capped, "throttled": cage.throttle(1e12)}


def environment() -> dict[str, str]:
    """With our modules on the path, and oneDNN's cache of kernels as the commands bound it. Huge pages are left to the
    libraries."""
    paths = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    few_kernels = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32"}
    return {**os.environ, **few_kernels, "PYTHONPATH": os.pathsep.join(paths), "TRANSFORMERS_VERBOSITY": "error"}


def _reason(status: int, errors: str, capped: bool) -> str:
    if status == -signal.SIGKILL:
        return "killed at the memory limit" if capped else "killed"
    lines = [line for line in errors.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit status {status}"
