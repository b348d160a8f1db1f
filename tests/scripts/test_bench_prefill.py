"""The benchmark of prefills runs in its small form."""

from __future__ import annotations

import json
from pathlib import Path

from scripts import bench_prefill


def test_prefill(tmp_path: Path) -> None:
    out = tmp_path / "prefill.json"
    assert bench_prefill.main(["--tokens", "64", "--repetitions", "1", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["runs"].keys() == {"without", "with"}
    assert all(run["ttft_s"] > 0 for run in found["runs"].values())
