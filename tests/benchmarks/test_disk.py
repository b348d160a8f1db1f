"""The disk benchmark: the whole command on a tiny model, and its medians."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from benchmarks import disk
from benchmarks.disk import summaries

from expertcast.predictors.messages import Json

SMALL = ["--small", "--layers", "2", "--memory", "0.3", "--repetitions", "1", "--prompt", "6", "--warm", "2"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_whole_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "disk.json"
    command = [*SMALL, "--bandwidth", "4e7", "--new-tokens", "3", "--sides", "direct"]
    command += ["--keep", str(tmp_path / "kept"), "--out", str(out)]
    assert disk.main(command) == 0, capsys.readouterr().err
    result = json.loads(out.read_text())
    rows = {row["side"]: row for row in result["results"]}
    assert set(rows) == {"disk", "direct"}, [run.get("failed") for run in result["runs"]]
    able, block = result["abilities"], result["model"]["expert_bytes"]
    for side, row in rows.items():
        if side == "disk":
            continue
        assert row["identical"], side
        assert row["throttled"] == able["throttled"]
        assert row["bytes_read"] >= (1 - row["hit_rate"]) * 2 * 4 * block * 0.99, "every miss is read"
        assert not able["capped"] or row["peak_bytes"] <= row["limit_bytes"]
    capsys.readouterr()
    assert disk.main(command) == 0
    assert "1: " not in capsys.readouterr().err, "nothing is measured twice"


def run(side: str, tpot_s: float, repetition: int = 0, memory: float = 0.15, **more: object) -> Json:
    row = {"side": side, "memory": memory, "throttle": 5e8, "repetition": repetition}
    return {**row, "tpot_s": tpot_s, "peak_bytes": 1, "slots": 8, "identical": True, **more}


def test_results_are_medians() -> None:
    runs = [run("direct", tpot_s, n, rate_waiting=4.6e8) for n, tpot_s in enumerate((0.3, 0.1, 0.2))]
    runs += [{**run("disk", 0, memory=0.0), "memory": None, "rate": 5e8}, run("mapped", 9, failed="killed")]
    rows = summaries(runs)
    direct = next(row for row in rows if row["side"] == "direct")
    assert direct["tpot_s"] == 0.2
    assert direct["tpot_range_s"] == [0.1, 0.3]
    assert direct["disk_bandwidth"] == 5e8
    assert all(row["side"] != "mapped" for row in rows), "what failed has no figures"
