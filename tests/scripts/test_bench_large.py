"""The benchmark of models larger than memory, on one of toy size."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from expertcast.data.traces import TraceDataset

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import bench_large

    out, kept = tmp_path / "large.json", tmp_path / "kept"
    command = ["--small", "--layers", "2", "--tokens", "2000", "--limit", "2e9", "--memory", "2MB", "--threads", "1"]
    runs = ["--runs", "collect", "forward"]
    assert bench_large.main([*command, *runs, "--keep", str(kept), "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["model"]["experts_bytes"] == 2 * 16 * 3 * 256 * 128 * 2
    assert set(result["runs"]) == {"collect", "forward"}
    for name, run in result["runs"].items():
        assert run["seconds"] > 0
        assert not run["capped"] or run["peak_bytes"] <= 2e9, name
    times = {name: run["seconds"] for name, run in result["runs"].items()}
    assert result["collect_over"] == {"forward": times["collect"] / times["forward"]}
    assert TraceDataset.open(kept / "collect").token_count() == 2000
