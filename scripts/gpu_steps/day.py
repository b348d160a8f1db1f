"""What a step is, and the file in which it keeps what it found.

    OUT/
      1-machine.json    one per step; `status` is running, done, failed or overran
      2-tests.jsonl     one line per GPU test, as they end
      log.txt           what the steps printed

A step's file is written when the step begins and whenever it has found something: a machine that goes away takes
nothing along. Nothing is imported here that a bare Python has not.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LOG_FILE = "log.txt"
TESTS_FILE = "2-tests.jsonl"
RUNNING, DONE, FAILED, OVERRAN = "running", "done", "failed", "overran"
LINES = 12
"""Of a traceback or a log that are kept with an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One part of the day, run in a process of its own."""

    number: int
    name: str
    module: str
    """Its function `run(day: Day) -> bool` says whether all checks passed."""
    seconds: float
    """After these it is stopped; it is not begun when less time is left."""
    small_seconds: float = 150
    """The same in the small form."""

    def file(self, out: Path) -> Path:
        """Where its result lies."""
        return out / f"{self.number}-{self.name}.json"


class Day:
    """What a step is given: the device, its time, and a place for what it finds."""

    def __init__(self, step: Step, out: Path, *, device: str, command: str, seconds: float) -> None:
        """Nothing is written yet.

        Args:
            step: the one that runs.
            out: folder of the results.
            device: `cuda`, or `cpu` for the small form.
            command: that was given to the script.
            seconds: that the step may take.
        """
        self.step, self.out, self.device, self.small = step, out, device, device == "cpu"
        self._begin = time.monotonic()
        self._end = self._begin + seconds
        self._record: dict[str, Any] = {
            "step": step.number,
            "name": step.name,
            "status": RUNNING,
            "passed": False,
            "device": device,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": command,
            "seconds": 0.0,
        }
        self.result: dict[str, Any] = {}

    def left(self) -> float:
        """Seconds until the step is stopped."""
        return self._end - time.monotonic()

    def begin(self, head: Mapping[str, Any]) -> None:
        """The step is running; `head` is what its whole file is about, such as hardware and versions."""
        self._record |= head
        self._write()

    def save(self, **found: Any) -> None:
        """Keep what was found so far, on disk too."""
        self.result |= found
        self._write()

    def attempt(self, what: str, call: Callable[[], bool]) -> bool:
        """Run a part of the step: what it says, or False if it fails, whose error is kept; the other parts go on.

        Args:
            what: its name.
            call: says whether its checks passed.
        """
        try:
            return call()
        except Exception:
            lines = traceback.format_exc().strip().splitlines()
            print(*lines, sep="\n", flush=True)
            self.save(errors={**self.result.get("errors", {}), what: lines[-LINES:]})
            return False

    def finish(self, status: str, *, passed: bool = False, error: list[str] | None = None) -> None:
        """The step is over.

        Args:
            status: one of the module's.
            passed: whether every check held.
            error: the last lines of what went wrong.
        """
        self._record |= {"status": status, "passed": passed} | ({"error": error} if error else {})
        self._write()

    def _write(self) -> None:
        self._record["seconds"] = round(time.monotonic() - self._begin, 2)
        write(self.step.file(self.out), {**self._record, "result": self.result})


def write(path: Path, record: Mapping[str, Any]) -> None:
    """The file is the old one or the new one, never a part."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w") as file:
        file.write(json.dumps(record, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read(path: Path) -> dict[str, Any] | None:
    """What a step's file says; None where there is none."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return found
