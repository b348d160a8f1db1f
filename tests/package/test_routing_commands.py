"""`simulate` and `advise` with a routing file: rows, refusals, and a traces folder's --memory."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from expertcast.cli import main
from expertcast.data.traces import TraceDataset
from expertcast.runtime.config import OffloadConfig
from tests.package.test_cli import fails

ROUTING = Path(__file__).resolve().parents[2] / "benchmarks" / "routing" / "gpt-oss-120b-k2.parquet"
MIB = 2**20


def test_simulate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    words = [
        "--memory",
        "3000MiB",
        "6000MiB",
        "--policy",
        "lru",
        "belady",
        "--scope",
        "global",
        "layer",
        "--bandwidth",
        "1e9",
        "--json",
    ]
    assert main(["simulate", str(ROUTING), *words, str(found), "--out", str(tmp_path / "out")]) == 0
    result = json.loads(found.read_text())
    rows = result["results"]
    assert [(row["policy"], row["scope"], row["memory_bytes"] // MIB) for row in rows] == [
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


def test_simulate_refuses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = str(ROUTING)
    assert "no such file" in fails(capsys, "simulate", "no/file.parquet")
    line = fails(capsys, "simulate", file, "--predictor", "linear", "--miss", "drop")
    assert "--miss, --predictor: of a traces folder" in line
    assert "give one of them" in fails(capsys, "simulate", file, "--memory", "1GB", "--slots", "9")
    assert "memory='much' is no size" in fails(capsys, "simulate", file, "--memory", "much")
    assert "give 26438400 or more" in fails(capsys, "simulate", file, "--memory", "9MB")
    assert "choose from global, layer" in fails(capsys, "simulate", file, "--scope", "token")
    assert "choose from lru, fifo" in fails(capsys, "simulate", file, "--policy", "mru")
    assert "score reads the router's scores" in fails(capsys, "simulate", file, "--policy", "score")
    assert "capacity=2: give the share" in fails(capsys, "simulate", file, "--capacity", "2")
    assert "leave --expert-bytes out" in fails(capsys, "simulate", file, "--expert-bytes", "3MiB")
    assert "ids are 0 to 99" in fails(capsys, "simulate", file, "--experts", "100")
    array = tmp_path / "a.npy"
    np.save(array, np.array([[[0, 1]], [[1, 2]]]))
    assert "give --expert-bytes" in fails(capsys, "simulate", str(array))
    assert main(["simulate", str(array), "--expert-bytes", "3MiB", "--slots", "2"]) == 0
    assert re.search(r"lru +global +6 +66.7% +25.0% +3", capsys.readouterr().out)


def test_advise(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found, saved = tmp_path / "found.json", tmp_path / "offload.json"
    command = [
        "advise",
        str(ROUTING),
        "--memory",
        "12GB",
        "--bandwidth",
        "pcie4",
        "--json",
        str(found),
        "--save",
        str(saved),
    ]
    assert main(command) == 0
    result = json.loads(found.read_text())
    rows = {(row["policy"], row["scope"]): row for row in result["results"]}
    best = min((row for key, row in rows.items() if key[0] != "belady"), key=lambda row: row["copy_s"])
    assert result["advised"] == {key: best[key] for key in result["advised"]}
    assert best["hits"] > rows["lru", "global"]["hits"]
    assert OffloadConfig.load(saved).policies.eviction.name == best["policy"]
    assert "belady, who knows the future, hits" in capsys.readouterr().out


def test_advise_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(ROUTING)
    assert "--predictor: of a model" in fails(capsys, "advise", file, "--predictor", "linear")
    assert "give one of them" in fails(capsys, "advise", file, "--memory", "1GB", "--capacity", "0.1")
    assert "are for routing files" in fails(capsys, "advise", "reference", "--experts", "4")


def test_memory_of_a_traces_folder(reference_traces: TraceDataset, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    words = ["simulate", str(reference_traces.folder), "--tokens", "200", "--processes", "1", "--memory", "5MB"]
    assert main([*words, "--json", str(found)]) == 0
    result = json.loads(found.read_text())
    assert result["results"][0]["slots"] == 5 * 10**6 // result["block_bytes"]["full"]
