"""The GPU benchmark's small form runs on a CPU, peer included, and writes what it measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_small_form_runs_on_this_machine(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, "scripts/gpu_bench.py", "--small", "--out", str(out), "--", "--no-advice", "--seed", "2"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    got = json.loads(out.read_text())
    assert len(got["runs"]) == 8
    assert all(run["identical"] for name, run in got["runs"].items() if name.startswith(("on_demand", "exact")))
    assert got["peer"].get("identical", True)
    assert set(got["peer"]) >= {"memory", "tpot_s", "moved_bytes"} or "accelerate" in got["peer"]["skipped"]
    assert got["hardware"]["machine"]
    assert got["versions"]["transformers"]
    assert got["date"]
    assert "gpu_bench.py --small" in got["command"]
    assert "seed 2" in got["routing"]
