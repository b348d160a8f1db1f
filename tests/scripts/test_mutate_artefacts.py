"""Three hundred damaged files, opened by commands: a one-line refusal or the right result."""

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


@pytest.mark.slow
def test_one_line_or_the_right_answer(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--count", "300", "--seed", str(SEED), "--json", str(found)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert run.returncode in (0, 1), run.stderr[-3000:]
    result = json.loads(found.read_text())
    assert result["trials"] >= 400
    assert len(result["table"]) >= 15
    assert result["failures"] == []
    assert result["table"]["all"]["refused"] >= 100
    assert result["table"]["all"]["right"] >= 20, "some damage is harmless"
