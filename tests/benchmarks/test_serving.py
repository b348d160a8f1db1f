"""The serving benchmark: the whole command in small form, its resumption, and its figures."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from benchmarks import serving
from benchmarks.__main__ import main

from expertcast.predictors.messages import Json

ROOT = Path(__file__).resolve().parents[2]
RESIDENT, ON_DEMAND, EXACT = NAMES = [f"transformers: {kind}" for kind in ("resident", "on demand", "exact")]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads what memory is a process's own")
def test_the_whole_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "serving.json"
    command = ["--small", "--allow-dirty", "--out", str(out)]
    _ended_behind_its_first_server(command, out)
    first = json.loads(out.read_text())
    assert [run["side"] for run in first["runs"]] == [RESIDENT] * 2
    assert serving.main(command) == 0, capsys.readouterr().err
    assert capsys.readouterr().err.count("round 1") == 2, "nothing is measured twice"
    result = json.loads(out.read_text())
    assert result["runs"][:2] == first["runs"]
    _check(result)
    assert main(["serving", *command, "--new-tokens", "5"]) == 2
    assert f"{out} has other settings" in capsys.readouterr().err
    assert json.loads(out.read_text()) == result


def _ended_behind_its_first_server(command: list[str], out: Path) -> None:
    words = [sys.executable, "-m", "benchmarks", "serving", *command]
    with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        while not out.is_file():
            assert process.poll() is None
            time.sleep(0.01)
        servers = list[psutil.Process]()
        while not any(server.net_connections() for server in servers):  # before, the benchmark may not know it
            time.sleep(0.01)
            servers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    assert not psutil.wait_procs(servers, timeout=10)[1], "no server is left behind"


def _check(result: Json) -> None:
    assert result["command"]
    assert result["git_revision"]
    assert result["versions"]["transformers"]
    assert result["conditions"]["cores"] > 0
    rows = {(row["side"], row["clients"]): row for row in result["rows"]}
    assert set(rows) == {(name, clients) for name in NAMES for clients in (1, 2)}
    for (name, _), row in rows.items():
        assert (row["answers"], row["lost"], row["same"]) == (4, 0, 4), row
        assert (row["hit_rate"] is None) == (row["resident"] is None) == (name == RESIDENT)
        assert name == RESIDENT or 0 < row["hit_rate"] < 1
        assert (row["on_demand"] is None) == (name != EXACT)
        assert 0 < row["first_s"] <= row["first_s_p95"]
        assert 0 < row["per_token_s"] <= row["per_token_s_p95"]
    assert [len(run["answers"]) for run in result["runs"]] == [4] * 6
    assert {answer["tokens"] for run in result["runs"] for answer in run["answers"]} == {4}
    exact, on_demand = (rows[name, 2]["requests_per_s"]["median"] for name in (EXACT, ON_DEMAND))
    assert rows[EXACT, 2]["on_demand"]["median"] == exact / on_demand


def test_what_cannot_be_measured_is_refused_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    for options, expected in (
        (["--sides", "none such"], "['none such']"),
        (["--vllm-python", str(tmp_path / "python")], "--vllm-python"),
        (["--out", str(broken)], f"{broken} is not a result"),
    ):
        assert main(["serving", "--small", "--allow-dirty", "--out", str(tmp_path / "new.json"), *options]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert expected in lines[0]
