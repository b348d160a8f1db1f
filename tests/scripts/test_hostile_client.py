"""A hostile client's requests, few of them: every good one is answered right, and nothing breaks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the server's memory is read from /proc")
def test_few_requests_in_both_modes(tmp_path: Path) -> None:
    results = tmp_path / "hostile.json"
    script = str(ROOT / "scripts" / "hostile_client.py")
    words = [sys.executable, script, "--requests", "200", "--seed", "1", "--json", str(results)]
    run = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    assert [(each["mode"], each["good"], each["wrong"]) for each in json.loads(results.read_text())] == [
        ("single", 40, []),
        ("batched", 40, []),
    ]
