"""The loading benchmark runs, and load_offloaded needs at most 1.15 times the checkpoint's size in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_of_load_offloaded(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    words = f"loading --layers 12 --experts 48 --hidden 256 --intermediate 384 --rounds 1 --out {out} --allow-dirty"
    command = [sys.executable, "-m", "benchmarks", *words.split(), "--methods", "load_offloaded memory"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    result = json.loads(out.read_text())
    assert 300e6 < (size := result["checkpoint_bytes"]) < 400e6
    (run,) = result["runs"]
    assert 0.9 < run["anonymous"] / size <= run["rss"] / size < 1.15
