"""What every process of a run does, whatever its interpreter: standard library only, so that llama.cpp's can too.

A child joins its control groups before anything else, loads its side, says `ready`, waits until the cage is set, and
measures.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def begin() -> dict[str, Any]:
    """The description of the run, which the command line names; this process is in its groups from here on."""
    spec: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    for group in spec["groups"]:
        (Path(group) / "cgroup.procs").write_text("0")
    return spec


def ready() -> None:
    """All is loaded: return when the cage is set."""
    print("ready", flush=True)
    if sys.stdin.readline() != "go\n":
        raise SystemExit(1)


def finish(spec: dict[str, Any], found: dict[str, Any]) -> None:
    """Leave what was found, with this process's own peak of resident memory."""
    Path(spec["out"]).write_text(json.dumps({**found, "peak_resident_bytes": peak_resident()}))


def bytes_read() -> int:
    """Bytes that this process has had read from disks so far, by requests and by page faults."""
    return _status("/proc/self/io", "read_bytes:")


def peak_resident() -> int:
    """Most bytes that were resident at a time."""
    return _status("/proc/self/status", "VmHWM:") * 1024


def timed_part(spec: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The tokens of the text that are read as the prompt, and those that follow one by one."""
    text: Sequence[int] = spec["tokens"]
    return list(text[: spec["prompt"]]), list(text[spec["prompt"] : spec["prompt"] + spec["warm"] + spec["timed"]])


def _status(path: str, name: str) -> int:
    lines = Path(path).read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])
