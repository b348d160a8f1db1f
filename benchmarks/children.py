"""Runs a module in a child process with a memory limit and a cold page cache.

The limit is a control group of version 1, created below this process's own group and removed afterwards. Without such
groups, or without permission to create them, a run has no limit and its result says so.
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

import psutil

from benchmarks.conditions import ROOT
from expertcast.predictors.messages import Json

_PREFIX = "bench-"
_REMOVALS = 50
"""Attempts to remove a group, 0.1 s apart: it is busy for a moment after its last process has ended."""


class Cage:
    """Control group of one run, as a context manager.

    Args:
        memory: memory limit in bytes; None: the memory is only counted.
    """

    def __init__(self, memory: int | None) -> None:
        self._memory, self.capped = _new_group("memory"), False
        if self._memory is not None and memory is not None:
            self.capped = _try_write(self._memory / "memory.limit_in_bytes", str(memory))
            # swapped memory would not be counted
            _try_write(self._memory / "memory.swappiness", "0")

    def __enter__(self) -> Cage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for group in self.groups:
            for _ in range(_REMOVALS):
                with suppress(OSError):
                    os.rmdir(group)
                    break
                time.sleep(0.1)

    @property
    def groups(self) -> list[str]:
        """The group's folder, or none; a process joins by writing to its `cgroup.procs`."""
        return [] if self._memory is None else [str(self._memory)]

    def forget_peak(self) -> None:
        """Reset the memory peak."""
        if self._memory is not None:
            _try_write(self._memory / "memory.max_usage_in_bytes", "0")

    @property
    def peak(self) -> int | None:
        """Peak memory in bytes since the last reset, including pages of files; None if unknown."""
        if self._memory is None:
            return None
        return int((self._memory / "memory.max_usage_in_bytes").read_text())


def drop_cached(folders: Iterable[Path]) -> int:
    """Drop the cached pages of all files in some folders (or of single files), except pages that a process maps; return
    the bytes of the files.
    """
    nbytes = 0
    for folder in folders:
        for path in (folder, *folder.rglob("*")):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())  # dirty pages cannot be dropped
                    nbytes += os.fstat(file.fileno()).st_size
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return nbytes


def _new_group(controller: str) -> Path | None:
    """Create a control group below this process's own; return None if that is not possible."""
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


def _try_write(path: Path, text: str) -> bool:
    try:
        path.write_text(text)
    except OSError:
        return False
    return True


_MOST_SECONDS = 3600
_SETTLED_S, _LARGE = 10, 1 << 30
"""Seconds after which a virtual machine's host has taken freed memory back, and bytes of files from which that is
waited for. A run that starts sooner finds the memory of the last one: one that imports for three seconds does not."""


def run(
    module: str,
    spec: Json,
    *,
    memory: int | None = None,
    cold: Iterable[Path] = (),
    python: str = sys.executable,
) -> Json:
    """Run a module in a child process.

    Args:
        module: name of the module.
        spec: input of the child, as JSON.
        memory: limit in bytes for the child and the pages of its files; None: no limit.
        cold: files, or folders whose files, leave the page cache before the start, large ones some seconds before,
            and again once the child has loaded.
        python: Python interpreter of the child.

    Returns:
        The child's results with `load_s`, the seconds until it has loaded, `peak_bytes`, `capped` and `beside`, the
        processors that other processes used meanwhile; or `failed` with the reason.
    """
    cold = list(cold)
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary, Cage(memory) as cage:
        out, errors = Path(temporary) / "out.json", Path(temporary) / "errors"
        written = Path(temporary) / "spec.json"
        written.write_text(json.dumps({**spec, "groups": cage.groups, "out": str(out)}))
        if drop_cached(cold) > _LARGE:
            time.sleep(_SETTLED_S)
        before = _busy_s(), time.monotonic()
        with errors.open("w") as log, subprocess.Popen(
            [python, "-m", module, str(written)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            text=True, env=environment(),
        ) as process, ExitStack() as stack:  # fmt: skip
            assert process.stdin is not None
            assert process.stdout is not None
            stack.callback(process.kill)  # no effect once it has ended
            started, load_s = time.monotonic(), 0.0
            if any(line == "ready\n" for line in iter(process.stdout.readline, "")):
                load_s = time.monotonic() - started
                drop_cached(cold)
                cage.forget_peak()
                with suppress(BrokenPipeError):  # the child has died; its error output has the reason
                    process.stdin.write("go\n")
                    process.stdin.flush()
            try:
                process.communicate(timeout=_MOST_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
        if process.returncode or not out.is_file():
            return {"failed": _reason(process.returncode, errors.read_text(errors="replace"), cage.capped)}
        found = json.loads(out.read_text())
        found["load_s"] = load_s
        found["beside"] = max(0.0, _busy_s() - before[0]) / (time.monotonic() - before[1])
        peak = cage.peak
        found["peak_bytes"] = found["peak_resident_bytes"] if peak is None else peak
        return {**found, "capped": cage.capped}


def _busy_s() -> float:
    """Return the seconds that all processors have computed for processes other than this one's ended children."""
    every, own = psutil.cpu_times(), os.times()
    return float(every.user + every.system + every.nice) - own.children_user - own.children_system


def abilities() -> Json:
    """Return whether memory can be `capped` on this machine."""
    with Cage(1 << 40) as cage:
        return {"capped": cage.capped}


def environment() -> dict[str, str]:
    """Return the environment of a child: this checkout on the path, and the commands' bound on oneDNN's kernel cache.
    Huge pages stay at the libraries' defaults.
    """
    paths = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    few_kernels = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32"}
    return {**os.environ, **few_kernels, "PYTHONPATH": os.pathsep.join(paths), "TRANSFORMERS_VERBOSITY": "error"}


def _reason(status: int, errors: str, capped: bool) -> str:
    if status == -signal.SIGKILL:
        return "killed at the memory limit" if capped else "killed"
    lines = [line for line in errors.splitlines() if line.strip()]
    return lines[-1].partition("ExpertcastError: ")[2] or lines[-1] if lines else f"exit status {status}"
