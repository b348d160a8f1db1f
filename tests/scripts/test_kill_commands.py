"""Commands that are killed, run twice at once, or have no disk space: one line, and the next run succeeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits and mounts are Linux's")
def test_all_faults_of_two_commands(tmp_path: Path) -> None:
    """`benchmarks/faults.md` has the others, and more kills. A shell's background job ignores SIGINT."""
    script, found = str(ROOT / "scripts" / "kill_commands.py"), tmp_path / "found.json"
    words = [sys.executable, script, "--kills", "3", "--only", "collect", "generate", "--json", str(found)]
    run = subprocess.run(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    rows = json.loads(found.read_text())["table"]
    signals = ("SIGKILL", "SIGTERM", "SIGINT")
    for command in ("collect", "generate"):
        right = {group.partition(": ")[2]: row["right"] for group, row in rows.items() if group.startswith(command)}
        assert [right[name] for name in signals] == [3, 3, 3]
        assert len(right) >= 7
