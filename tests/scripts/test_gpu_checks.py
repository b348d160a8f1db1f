"""The GPU script's small form runs on a CPU and writes what it measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_small_form_runs_on_this_machine(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, "scripts/gpu_checks.py", "--skip-tests", "--new-tokens", "3", "--repetitions", "1"]
    subprocess.run([*command, "--out", str(out)], cwd=ROOT, check=True, capture_output=True, timeout=300)
    result = json.loads(out.read_text())
    runs = result["benchmark"]["runs"]
    assert set(runs) == {"on_demand_no_cache", "exact_no_cache", "on_demand", "exact", "speculate"}
    assert all(runs[name]["identical"] for name in runs if name != "speculate")
    assert runs["on_demand_no_cache"]["hit_rate"] == 0
    assert result["hardware"]["machine"]
    assert set(result["links"]) == {"instant", "kernel"}
    assert all(0 < link["misses_s"] < 1 for link in result["links"].values())
    assert result["graph"]["eager_tpot_s"] > 0


def test_bad_slots_are_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/gpu_checks.py", "--skip-tests", "--slots", "1", "--out", str(tmp_path / "x")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 2
    assert "slots=1" in run.stderr.strip().splitlines()[-1]
