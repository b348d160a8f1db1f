"""Starts the process of one run in a cage of its own, and collects what it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

from disk_sides.cage import Cage, drop_cached
from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import Json

SCRIPTS = Path(__file__).resolve().parents[1]
SOURCE = SCRIPTS.parent / "src"
TORCH, LLAMA = "disk_sides.torch_run", "disk_sides.llama_run"
_MOST_SECONDS = 3600


def run(
    module: str,
    spec: Json,
    *,
    folder: Path,
    python: str = sys.executable,
    memory: int | None = None,
    rate: float | None = None,
    cold: Iterable[Path] = (),
) -> Json:
    """One run.

    Args:
        module: that the process runs.
        spec: what it reads.
        folder: on the disk that is throttled.
        python: its interpreter.
        memory: bytes that it and the pages of its files may take; None: no limit.
        rate: bytes per second that the disk gives from when it has loaded; None: as it is.
        cold: folders whose files are not in the page cache when it starts, and again when it has loaded.

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
            [python, "-m", module, str(written)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            env=environment(),
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


def call(python: str, *arguments: str) -> str:
    """Standard output of a command of ours in some interpreter.

    Raises:
        ExpertcastError: it failed; with its last line.
    """
    done = subprocess.run([python, *arguments], capture_output=True, text=True, env=environment(), check=False)
    if done.returncode:
        raise ExpertcastError(f"{' '.join(arguments[:2])} failed: {_reason(done.returncode, done.stderr, False)}")
    return done.stdout


def environment() -> dict[str, str]:
    """With our modules on the path. Huge pages are left to the libraries."""
    paths = [str(SCRIPTS), str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRANSFORMERS_VERBOSITY": "error"}


def _reason(status: int, errors: str, capped: bool) -> str:
    if status == -signal.SIGKILL:
        return "killed at the memory limit" if capped else "killed"
    lines = [line for line in errors.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit status {status}"
