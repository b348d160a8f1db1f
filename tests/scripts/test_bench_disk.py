"""The disk's benchmark: the whole script on a model of toy size, its page, and the store of `--thirty`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from expertcast.predictors.messages import Json
from expertcast.runtime import load_offloaded

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--small", "--layers", "2", "--memory", "0.3", "--repetitions", "1", "--prompt", "6", "--warm", "2"]


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_whole_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import bench_disk

    out = tmp_path / "disk.json"
    command = [*SMALL, "--bandwidth", "4e7", "--new-tokens", "3", "--sides", "direct", "forecasts", "llama.cpp"]
    command += ["--llama-python", sys.executable, "--keep", str(tmp_path / "kept"), "--out", str(out)]
    assert bench_disk.main(command) == 0, capsys.readouterr().err
    result = json.loads(out.read_text())
    rows = {(row["side"], row["workload"]): row for row in result["results"]}
    assert set(rows) == {("disk", "own"), ("direct", "own"), ("direct", "process"), ("forecasts", "process")}
    assert set(result["skipped"]) == {"llama.cpp"}
    able, block = result["abilities"], result["model"]["expert_bytes"]
    for (side, _), row in rows.items():
        if side == "disk":
            continue
        assert row["identical"], side
        assert row["throttled"] == able["throttled"]
        assert row["bytes_read"] >= (1 - row["hit_rate"]) * 2 * 4 * block * 0.99, "every miss is read"
        assert not able["capped"] or row["peak_bytes"] <= row["limit_bytes"]
    assert str(tmp_path) not in json.dumps(result["command"]).replace(str(out), "")
    page = out.with_suffix(".md").read_text()
    assert "**yes**, everywhere" in page
    assert "| forecasts | 30% |" in page
    capsys.readouterr()
    assert bench_disk.main(command) == 0
    assert "1: " not in capsys.readouterr().err, "nothing is measured twice"


def run(side: str, tpot_s: float, repetition: int = 0, memory: float = 0.15, **more: object) -> Json:
    row = {"side": side, "workload": "own", "memory": memory, "throttle": 5e8, "repetition": repetition}
    return {**row, "tpot_s": tpot_s, "peak_bytes": 1, "slots": 8, "identical": True, **more}


def test_results_are_medians_and_targets_follow_from_them() -> None:
    from disk_sides.figures import summaries
    from disk_sides.targets import targets

    runs = [run("direct", tpot_s, n, rate_waiting=4.6e8) for n, tpot_s in enumerate((0.3, 0.1, 0.2))]
    runs += [run("bitsplit", 0.15), run("llama.cpp", 0.31), run("accelerate", 1.4)]
    runs += [{**run("disk", 0, memory=0.0), "memory": None, "rate": 5e8}, run("mapped", 9, failed="killed")]
    rows = summaries(runs)
    direct = next(row for row in rows if row["side"] == "direct")
    assert direct["tpot_s"] == 0.2
    assert direct["tpot_range_s"] == [0.1, 0.3]
    assert direct["disk_bandwidth"] == 5e8
    assert all(row["side"] != "mapped" for row in rows), "what failed has no figures"
    said = targets({"results": rows})
    assert said[0].startswith("- 10 times accelerate: **no**, 0 of 1 (bitsplit, 15%, 0.5 GB/s: 9.33")
    assert said[1].startswith("- 2 times llama.cpp at 15%: **yes** (bitsplit, 15%, 0.5 GB/s: 2.07")
    assert said[2].endswith("**yes** (direct, 15%, 0.5 GB/s: 0.92)")
    assert said[3].endswith("**yes** (bitsplit, 15%, 0.5 GB/s: 1.33)")
    assert said[4].endswith("not measured")
    assert said[5].endswith("**yes**, everywhere")


def test_routing_is_described() -> None:
    from disk_sides.routing import described

    found = described([[[0, 1]], [[1, 2]], [[1, 2]]], experts=4, shares=[0.5, 1.0])
    assert found["overlap"] == 0.75
    assert found["distinct"] == 0.75
    assert found["lru"] == {"0.5": 0.5, "1": 0.5}


def test_the_large_store_is_the_models(tmp_path: Path) -> None:
    from disk_sides.model_files import thirty, write_model
    from disk_sides.thirty import pack

    config = thirty(2.5)
    config.num_hidden_layers, config.hidden_size, config.num_experts, config.vocab_size = 2, 64, 16, 128
    model = write_model(tmp_path / "model", config, experts=False)
    assert pack(tmp_path / "model", tmp_path / "store", model["experts_bytes"]) is not None
    assert pack(tmp_path / "model", tmp_path / "store", model["experts_bytes"]) is None
    options = {"store": "disk", "store_folder": tmp_path / "store", "slots": 16, "device": "cpu"}
    tokens, logits = torch.tensor([[1, 2, 3]]), []
    for link in ("disk", "instant"):
        with load_offloaded(tmp_path / "model", link=link, **options) as offloaded, torch.no_grad():
            weights = offloaded.store.views(1)["down_proj"].float()
            logits.append(offloaded(input_ids=tokens).logits)
    assert 0.019 < weights.std() < 0.021
    assert not torch.equal(weights[0], weights[1])
    assert torch.equal(*logits)
    assert logits[0].isfinite().all()
