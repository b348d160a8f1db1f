"""Commands that are killed, run twice at once, or have no disk space: one line, and the next run succeeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def faults(found: Path, *words: str) -> list[dict[str, object]]:
    """Run the script as a background job of a shell, which ignores SIGINT; return its rows."""
    script = str(ROOT / "scripts" / "kill_commands.py")
    run = subprocess.run(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, script, *words, "--json", str(found)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    rows: list[dict[str, object]] = json.loads(found.read_text())
    return rows


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="what a process has loaded is read from /proc")
def test_signals_of_two_commands(tmp_path: Path) -> None:
    """A short command, and the one that ends in order."""
    rows = faults(tmp_path / "found.json", "--signals", "--only", "store", "serve")
    assert [(row["command"], row["moment"], row["status"]) for row in rows] == [
        (command, moment, 0 if (command, moment) == ("serve", "middle") else status)
        for command in ("store", "serve")
        for moment in ("start-up", "middle", "writing")
        for status in (143, 130)
    ]
    left = {(row["command"], row["moment"]): row["left"] for row in rows}
    assert (left["store", "middle"], left["store", "writing"]) == ("nothing", "1: store")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits and mounts are Linux's")
def test_all_faults_of_two_commands(tmp_path: Path) -> None:
    """`benchmarks/faults.md` has the others, and more kills."""
    rows = faults(tmp_path / "found.json", "--kills", "3", "--only", "collect", "generate")
    assert {row["command"] for row in rows} == {"collect", "generate"}
    assert sum(row["fault"] == "killed" for row in rows) == 6
    assert len({row["fault"] for row in rows}) >= 5
