"""The day a GPU is there, in its small form on the CPU: everything is really run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ("1-machine", "2-tests", "3-bits", "4-first-rows", "5-rest", "6-disk", "7-drafts", "8-vllm")


def read(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


@pytest.mark.slow
def test_small_form(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/gpu_day.py", "--small", "--minutes", "30", "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=500)
    records = {name: read(tmp_path, name) for name in FILES}
    for name, record in records.items():
        assert record["status"] == "done", name
        assert record["passed"], name
        assert record["device"] == "cpu"
        assert record["seconds"] > 0
        assert record["hardware"]["machine"]
        assert record["versions"]["transformers"]
        assert record["date"]
        assert "errors" not in record["result"]
        assert record["command"].startswith("gpu_day.py --small")
    machine, tests, bits, first, rest, disk, drafts, vllm = (record["result"] for record in records.values())
    assert machine["host"]["kernel_launch_us"] > 0
    assert machine["link"]["h2d_block_bytes_per_s"] > 1e6
    assert set(machine["behind_copies"]["upload_us"]) == {"0", "2", "8"}
    for link in ("emulated", "kernel"):
        assert 0 < machine[f"misses_{link}"]["misses_us"] < 1e6
        assert machine[f"beside_{link}"]["grouped_mm_alone_us"] > 0
        assert machine[f"beside_{link}"]["copies_bytes_per_s"] > 1e6
    assert machine["beside_emulated"]["products"] > 0
    assert set(machine["beside_kernel"]["by_sm_carveout"]) == {"8", "16", "32", "64"}
    lines = [json.loads(line) for line in (tmp_path / "2-tests.jsonl").read_text().splitlines()]
    assert tests["outcomes"] == {"passed": tests["tests"]}
    assert {line["outcome"] for line in lines} == {"passed"}
    assert len(lines) == tests["tests"] > 5
    assert set(bits["emulated"]["checks"]) == {"on_demand_no_cache", "exact_no_cache", "on_demand", "exact"}
    assert bits["graph"]["eager_tpot_s"] > 0
    assert bits["host"]["launch_us"] * bits["host"]["launches"] == pytest.approx(bits["host"]["step_us"])
    assert bits["emulated"]["runs"]["on_demand_no_cache"]["hit_rate"] == 0
    assert set(first["rows"]) == {"1", "0.9"}
    assert first["layers"] == 2
    assert first["fewer_layers_because"] is None
    for accuracy, row in first["rows"].items():
        assert set(row["runs"]) == {"on_demand", "exact"}
        assert row["measured_routing"]["accuracy"] == pytest.approx(float(accuracy), abs=0.1)
    assert set(rest["prompts"]) == {"8", "16"}
    assert len(rest["prompts"]["8"]["runs"]) == 8
    assert rest["peer"].get("identical", True)
    assert set(rest["other_link"]["runs"]) == {"on_demand", "exact"}
    assert rest["graph"]["eager_tpot_s"] > 0
    assert rest["training"]["report"]["distances"]
    assert rest["left_out"] == []
    assert set(disk["ways"]) == {"mapped", "direct", "coded", "direct_forecasts", "coded_forecasts"}
    assert all(way["identical"] and way["tpot_s"][0] > 0 for way in disk["ways"].values())
    assert disk["ways"]["coded"]["stored_bytes"] < 0.95 * disk["ways"]["direct"]["stored_bytes"]
    assert disk["ways"]["direct"]["block_bytes_per_s"] > 1e6
    assert set(drafts["runs"]) == {"fp32 1000000000.0", "bf16 1000000000.0"}
    assert all(draft["identical"] for draft in drafts["runs"]["fp32 1000000000.0"].values())
    if "left_out" not in vllm:  # where the plug-in's environment was made
        assert vllm["sides"]["device eager"]["identical"]
        assert vllm["sides"]["device eager"]["counters"]["link"] == "kernel"
    assert list(tmp_path.glob("tmp*")) == []


@pytest.mark.slow
def test_gpu_tests_are_collected_without_datasets() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "tests.scripts.no_datasets", "-m", "gpu", "--collect-only", "-q"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout[-2000:]
    assert "test_cuda_link.py" in run.stdout
    assert "error" not in run.stdout
