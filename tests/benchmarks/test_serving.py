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
from benchmarks.serving import alternating, read_arguments
from benchmarks.serving_clients import figures
from benchmarks.serving_sides import Setting, chosen, sides

from expertcast.predictors.messages import Json

ROOT = Path(__file__).resolve().parents[2]
RESIDENT, ON_DEMAND, EXACT = NAMES = [
    f"transformers, one by one: {kind}" for kind in ("resident", "on demand", "exact")
]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads what memory is a process's own")
def test_the_whole_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "serving.json"
    command = ["--small", "--allow-dirty", "--out", str(out)]
    _ended_behind_its_first_server(command, out)
    first = json.loads(out.read_text())
    assert [run["side"] for run in first["runs"]] == [RESIDENT]
    assert serving.main(command) == 0, capsys.readouterr().err
    assert capsys.readouterr().err.count("round 1") == 2, "nothing is measured twice"
    result = json.loads(out.read_text())
    assert result["runs"][:1] == first["runs"]
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
    assert list(rows) == [(name, clients) for name in NAMES for clients in (1, 2)]
    for (name, _), row in rows.items():
        assert (row["answers"], row["lost"], row["same"]) == (4, 0, 4), row
        assert (row["hit_rate"] is None) == (name == RESIDENT)
        assert name == RESIDENT or 0 < row["hit_rate"] < 1
        assert 0 < row["first_s"] <= row["first_s_p95"]
    assert [[len(load["answers"]) for load in run["loads"]] for run in result["runs"]] == [[4, 4]] * 3
    assert {answer["tokens"] for run in result["runs"] for load in run["loads"] for answer in load["answers"]} == {4}
    ratios = {(row["side"], row["clients"]): row for row in result["ratios"]}
    assert set(ratios) == set(rows) - {(RESIDENT, 1), (RESIDENT, 2)}
    exact, on_demand = rows[EXACT, 2], rows[ON_DEMAND, 2]
    assert ratios[EXACT, 2]["on_demand"] == [exact["requests_per_s"] / on_demand["requests_per_s"]]
    assert [each["side"] for each in result["memory"]] == NAMES
    assert all(each["before_bytes"] > 1e8 < each["after_bytes"] for each in result["memory"])
    ends = {end["side"]: end for end in result["ends"]}
    assert list(ends) == NAMES
    assert ends[RESIDENT]["answers"] != ["half"]
    for name in (ON_DEMAND, EXACT):
        assert (ends[name]["statuses"], ends[name]["answers"], ends[name]["killed"]) == ([0], ["told"], 0)


def run(side: str, number: int, *loads: tuple[int, float, list[str]], seconds: float = 1.0) -> Json:
    """Return a side's stored results of one round: clients, seconds and texts of its loads."""
    kept = [
        {"clients": clients, "seconds": took, "lost": 1, "hits": None if "resident" in side else 3.0 + number,
         "misses": None if "resident" in side else 1.0,
         "answers": [{"prompt": at, "text": text, "tokens": 3, "first_s": 0.25, "seconds": took}
                     for at, text in enumerate(texts)]}
        for clients, took, texts in loads
    ]  # fmt: skip
    end = {"seconds": seconds, "killed": seconds > 20, "status": -9 if seconds > 20 else 0, "answer": "told"}
    return {"side": side, "round": number, "loads": kept, "memory_bytes": [10, 20 + 4 * number], "end": end}


def test_figures_are_medians_and_ratios_are_within_rounds() -> None:
    batched = "transformers, batched: exact"
    runs = [
        run(EXACT, 1, (4, 2.0, ["a", "b"]), (1, 1.0, ["a", "b"]), seconds=31),
        run(ON_DEMAND, 1, (4, 8.0, ["a", "c"]), (1, 4.0, ["a", "b"])),
        run(RESIDENT, 0, (1, 1.0, ["a", "b"]), (4, 1.0, ["a", "b"])),
        run(ON_DEMAND, 0, (1, 1.0, ["a", "b"]), (4, 2.0, ["a", "b"])),
        run(EXACT, 0, (1, 0.5, ["a", "b"]), (4, 1.0, ["a", "b"])),
        run(batched, 0, (1, 0.25, ["a", "b"])),
    ]
    found = figures({"runs": runs})
    rows = {(row["side"], row["clients"]): row for row in found["rows"]}
    assert list(rows) == [(name, clients) for name in NAMES for clients in (1, 4)] + [(batched, 1)]
    on_demand = rows[ON_DEMAND, 4]
    assert (on_demand["rounds"], on_demand["answers"], on_demand["lost"], on_demand["same"]) == (2, 4, 2, 3)
    assert on_demand["requests_per_s"] == (1.0 + 0.25) / 2
    assert on_demand["per_token_s"] == ((2 - 0.25) / 2 + (8 - 0.25) / 2) / 2
    assert on_demand["hit_rate"] == 7 / 9
    assert rows[RESIDENT, 1]["hit_rate"] is None
    assert rows[batched, 1]["same"] == 0, "its own resident side was not measured"
    ratios = {(row["side"], row["clients"]): row for row in found["ratios"]}
    assert ratios[EXACT, 4]["on_demand"] == [2.0, 4.0]
    assert ratios[EXACT, 4]["resident"] == [1.0], "the resident side has one round"
    assert ratios[batched, 1] == {"side": batched, "clients": 1, "resident": [], "on_demand": [], "one_by_one": [2.0]}
    assert found["memory"][1] == {"side": ON_DEMAND, "before_bytes": 10, "after_bytes": 22}


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


def test_orders_turn_and_what_is_given_counts_more_than_small() -> None:
    assert [alternating([1, 4, 16], number) for number in range(3)] == [[1, 4, 16], [16, 4, 1], [1, 4, 16]]
    args = read_arguments(["--small", "--allow-dirty", "--out", "a.json", "--clients", "3"])
    assert (args.clients, args.requests, args.slots) == ([3], serving.SMALL["requests"], 192)
    assert read_arguments(["--out", "a.json"]).requests == 16


def test_a_resident_side_comes_with_those_compared_with_it() -> None:
    every = sides(Setting(Path("model"), "checkpoint", 192, 1e8, 2, "python"))
    assert len(every) == 9
    assert [side.name for side in chosen(every, ["batched: exact", "vLLM"])] == [
        "transformers, batched: resident", "transformers, batched: exact", "vLLM: resident", "vLLM: on demand",
        "vLLM: exact",
    ]  # fmt: skip
    assert chosen(every, []) == every
