"""Three hundred damaged files, each opened by commands: one line or the right answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "mutate_artefacts.py"
SEED = 16


def _run(*words: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_one_line_or_the_right_answer(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    run = _run(SCRIPT, "--count", 300, "--seed", SEED, "--json", found)
    assert run.returncode in (0, 1), run.stderr[-3000:]
    result = json.loads(found.read_text())
    assert result["operations"] >= 400
    assert len(result["by_file"]) >= 15
    assert result["failures"] == []
    total = {kind: sum(row[kind] for row in result["by_file"].values()) for kind in ("right", "refused")}
    assert total["refused"] >= 100
    assert total["right"] >= 20, "some damage is harmless"


def test_what_came_out_is_told_apart(tmp_path: Path) -> None:
    run = _run("-m", "tests.scripts.outcomes_script", tmp_path)
    assert run.stdout.splitlines() == [
        "right", "refused", "unnamed", "traceback", "traceback", "traceback", "hung",
        "changed .a[1]: 3 became 2", "edited",
    ], run.stderr  # fmt: skip
