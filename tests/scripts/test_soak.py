"""The soak in small form: random deployments reproduce the resident model's bits, and errors and hangs are detected."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "soak.py"


def _soak(*words: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, words)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_a_few_deployments(tmp_path: Path) -> None:
    run = _soak("--requests", 1000, "--seed", 27, "--json", tmp_path / "found.json")
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["counts"]["requests"] >= 1000
    assert found["trials"] == found["table"]["all"]["right"] == run.stdout.count("outcome='right'") > 0
    assert found["failures"] == []
