"""`expertcast simulate`: policies, machines, disks and routing files."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from expertcast.cli import main
from expertcast.commands.options import policies_of
from expertcast.commands.simulate import MachineOptions, PolicyOptions, cases_of
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.policies import EVICTION, Policies
from expertcast.runtime.simulation.machine import Case
from tests.package.test_cli import ran
from tests.training.synthetic import tiny_view

NAMES = {"router_input": "router_input"}


def cases(policies: PolicyOptions, **given: object) -> list[Case]:
    speeds = given.pop("bandwidth", ())
    options = MachineOptions(bandwidth=speeds)  # type: ignore[arg-type]
    places = {"slots": (), "shares": (), **given}
    chosen = list(policies.chosen((), ["lru"]))
    return cases_of(chosen, tiny_view(), options, names=NAMES, **places)  # type: ignore[arg-type]


def test_own_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference_traces: TraceDataset) -> None:
    """MODULE:CLASS from the current folder, in `simulate` by other processes too, and in --policies."""
    (tmp_path / "mine.py").write_text(
        "from expertcast.runtime.policies import LRU\n\n\nclass Aged(LRU):\n    name = 'aged'\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(EVICTION, "_classes", dict(EVICTION._classes))
    monkeypatch.setattr(sys, "path", list(sys.path))
    rows = ran(tmp_path, f"simulate {reference_traces.folder} --tokens 60 --processes 2 --policy mine:Aged lru")[
        "results"
    ]
    assert [row["eviction"] for row in rows] == ["aged", "lru"]
    assert rows[0]["misses"] == rows[1]["misses"]
    given = policies_of(["eviction=mine:Aged", "scope=layer"])
    assert (
        given
        == OffloadConfig(policies="eviction=aged scope=layer").policies
        == Policies(eviction="aged", scope="layer")
    )
    for word, message in (("mine:Old", "cannot import policy mine:Old"), ("json:JSONDecoder", "is no policy")):
        with pytest.raises(ExpertcastError, match=message):
            policies_of([f"eviction={word}"])
    with pytest.raises(ExpertcastError, match="policies 'evict': give one preset, or KIND=POLICY of eviction, "):
        OffloadConfig(policies="evict=lru")


def test_a_sweep(capsys: pytest.CaptureFixture[str], reference_traces: TraceDataset, tmp_path: Path) -> None:
    out, command = tmp_path / "out", f"simulate {reference_traces.folder} --tokens 100 --processes 1"
    got = ran(tmp_path, f"{command} --sweep --policy lru lfu --out {out}")
    assert json.loads((out / "results.json").read_text())["results"] == got["results"]
    assert [row["eviction"] for row in got["results"]] == ["lru", "lfu"] * 5 + ["belady"] * 5
    assert [row["slots"] for row in got["results"][:10:2]] == [7, 38, 76, 192, 345]
    wanted = {
        "eviction", "prefetch", "miss", "routing", "scope", "slots", "capacity", "bandwidth", "hit_rate", "misses",
        "collisions", "bytes", "tpot_s", "perplexity", "agreement",
    }  # fmt: skip
    assert all(wanted <= set(row) for row in got["results"])
    assert {path.name for path in out.iterdir()} == {
        "results.json", "table.txt", "hit_rate.png", "tpot.png",
    }  # fmt: skip
    assert "belady" in (out / "table.txt").read_text()
    options = "--scope layer --capacity 0.01 0.25 --bandwidth 1e9 --miss fetch drop"
    unknown = ran(tmp_path, f"{command} {options} --no-quality")["results"]
    assert [(row["perplexity"], row["agreement"], row["kl"]) for row in unknown] == [(None, None, None)] * 2
    capsys.readouterr()
    exact, lossy = ran(tmp_path, f"{command} {options} --quality-tokens 40")["results"]
    assert "left out 2" in capsys.readouterr().out
    assert (exact["agreement"], exact["kl"]) == (1.0, 0.0)
    assert lossy["perplexity"] != exact["perplexity"]
    assert lossy["kl"] > 0
    assert lossy["tpot_s"] < exact["tpot_s"]


def test_forecasts(capsys: pytest.CaptureFixture[str], reference_traces: TraceDataset, tmp_path: Path) -> None:
    command = f"simulate {reference_traces.folder} --tokens 200 --processes 1 --predictor next_norm --bandwidth 4e9"
    preset, without, forecast = ran(tmp_path, f"{command} --prefetch none top_k --preset on_demand --policy lru")[
        "results"
    ]
    assert preset["predictor"] is None
    assert re.search("lru +next_norm +top_k", capsys.readouterr().out)
    assert without["misses"] == preset["misses"] > forecast["misses"]
    assert forecast["prefetch_precision"] > 0.5


ROUTING = Path(__file__).resolve().parents[2] / "benchmarks" / "routing" / "gpt-oss-120b-k2.parquet"


def test_a_routing_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = "--memory 3000MiB 6000MiB --policy lru belady --scope global layer --bandwidth 1e9"
    result = ran(tmp_path, f"simulate {ROUTING} {words} --out {tmp_path / 'out'}")
    rows = result["results"]
    assert [(row["policy"], row["scope"], row["memory_bytes"] // 2**20) for row in rows] == [
        (policy, scope, mib) for mib in (3000, 6000) for policy in ("lru", "belady") for scope in ("global", "layer")
    ]
    assert rows[0]["hits"] == pytest.approx(0.448, abs=0.0005)
    assert rows[0]["hits"] == pytest.approx(1 - rows[0]["misses"] / rows[0]["requests"])
    assert rows[0]["bytes_moved"] == rows[0]["misses"] * 13219200
    assert rows[0]["steps"] == 64
    assert rows[0]["copy_s"] == pytest.approx(rows[0]["bytes_moved"] / 64 / 1e9)
    assert sum(rows[0]["per_layer"]["misses"]) == rows[0]["misses"]
    assert rows[0]["prompt"]["steps"] == 1
    assert result["shape"] == {"L": 36, "E": 128, "K": 2}
    assert json.loads((tmp_path / "out" / "results.json").read_text())["results"] == rows
    assert "44.8%" in capsys.readouterr().out
    assert "44.8%" in (tmp_path / "out" / "table.txt").read_text()
    assert (tmp_path / "out" / "hit_rate.png").stat().st_size > 1000


def test_predictors_on_a_routing_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    result = ran(tmp_path, f"eval {ROUTING} --predictor frequency previous_token")
    assert result["recall_at_k"]["previous_token"]["mean"] == pytest.approx(0.191, abs=0.0005)
    assert len(result["recall_at_k"]["frequency"]["per_layer"]) == 35
    assert (result["counted"], result["tokens"], result["k"], result["experts"]) == (74, 75, 2, 128)
    assert re.search(r"predictor +mean +1 .*\nfrequency +0.102", capsys.readouterr().out)


def test_routing_in_an_array(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    array = tmp_path / "a.npy"
    np.save(array, np.array([[[0, 1]], [[1, 2]]]))
    assert main(["simulate", str(array), "--expert-bytes", "3MiB", "--slots", "2"]) == 0
    assert re.search(r"lrfu +global +6 +66.7% +25.0% +3", capsys.readouterr().out)


def test_memory_of_a_traces_folder(reference_traces: TraceDataset, tmp_path: Path) -> None:
    result = ran(tmp_path, f"simulate {reference_traces.folder} --tokens 200 --processes 1 --memory 5MB")
    assert result["results"][0]["slots"] == 5 * 10**6 // result["block_bytes"]["full"]
