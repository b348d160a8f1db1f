"""The benchmark of servers: the whole script in small form, how it goes on, its figures and its page."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from expertcast.predictors.messages import Json

ROOT = Path(__file__).resolve().parents[2]
MARKS = "# Serving\n\n<!-- serving -->\nwhat stood there\n<!-- end of serving -->\n\nThe end.\n"
RESIDENT, ON_DEMAND, EXACT = NAMES = [
    f"transformers, one by one: {kind}" for kind in ("resident", "on demand", "exact")
]


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads what memory is a process's own")
def test_the_whole_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import bench_serving

    out, page = tmp_path / "serving.json", tmp_path / "serving.md"
    page.write_text(MARKS)
    command = ["--small", "--out", str(out), "--page", str(page)]
    _ended_behind_its_first_server(command, out)
    first = json.loads(out.read_text())
    assert [run["side"] for run in first["runs"]] == [RESIDENT]
    assert bench_serving.main(command) == 0, capsys.readouterr().err
    assert capsys.readouterr().err.count("round 1") == 2, "nothing is measured twice"
    result = json.loads(out.read_text())
    assert result["runs"][:1] == first["runs"]
    _check(result)
    shown = page.read_text()
    assert shown.startswith(
        "# Serving\n\n<!-- serving -->\n\n    python scripts/bench_serving.py --small --out serving"
    )
    assert shown.endswith("\n\n<!-- end of serving -->\n\nThe end.\n")
    assert "what stood there" not in shown
    assert all(shown.count(f"| {name} |") >= 3 for name in NAMES)
    assert str(tmp_path) not in shown
    page.write_text(MARKS)
    assert bench_serving.main(["--show", *command]) == 0
    assert page.read_text() == shown
    assert bench_serving.main([*command, "--new-tokens", "5"]) == 2
    assert capsys.readouterr().err == f"bench_serving: {out} is of other settings: remove it, or give another --out\n"
    assert json.loads(out.read_text()) == result


def _ended_behind_its_first_server(command: list[str], out: Path) -> None:
    words = [sys.executable, "scripts/bench_serving.py", *command]
    with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        while not out.is_file():
            assert process.poll() is None
            time.sleep(0.01)
        servers = list[psutil.Process]()
        while not servers:
            servers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    assert not psutil.wait_procs(servers, timeout=10)[1], "no server is left behind"


def _check(result: Json) -> None:
    assert result["command"].startswith("bench_serving.py --small")
    assert result["git_revision"]
    assert result["versions"]["transformers"]
    assert result["hardware"]["cores"] > 0
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
    """What a file keeps of a side in a round: clients, seconds and texts of its loads."""
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
    from serving_sides.figures import figures
    from serving_sides.report import tables

    batched = "transformers, batched: exact"
    runs = [
        run(EXACT, 1, (4, 2.0, ["a", "b"]), (1, 1.0, ["a", "b"]), seconds=31),
        run(ON_DEMAND, 1, (4, 8.0, ["a", "c"]), (1, 4.0, ["a", "b"])),
        run(RESIDENT, 0, (1, 1.0, ["a", "b"]), (4, 1.0, ["a", "b"])),
        run(ON_DEMAND, 0, (1, 1.0, ["a", "b"]), (4, 2.0, ["a", "b"])),
        run(EXACT, 0, (1, 0.5, ["a", "b"]), (4, 1.0, ["a", "b"])),
        run(batched, 0, (1, 0.25, ["a", "b"])),
    ]
    settings = {"threads": 2, "slots": 192, "bandwidth": 1e8, "requests": 2, "new_tokens": 3}
    result: Json = {"command": "bench_serving.py", "settings": settings, "runs": runs}
    found = figures(result)
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
    text = tables(result)
    assert "1 to 2 rounds" in text
    assert f"| {EXACT} | 4 | 1.00 | 3.00 (2.00 to 4.00) |  |" in text
    assert f"| {EXACT} | 0 | 0 | 16.0 | 31.0 | 0, -9, 1 killed | told |" in text


def test_a_file_of_the_earlier_form_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import bench_serving

    rows = [
        {"side": name, "clients": 1, "answers": 2, "lost": 0, "same": 2, "requests_per_s": speed, "first_s": 0.1,
         "first_s_p95": 0.2, "per_token_s": 0.01, "per_token_s_p95": 0.02, "memory_bytes": [[1_000_000, 2_000_000]],
         "hit_rate": rate}
        for name, speed, rate in ((RESIDENT, 4.0, None), (ON_DEMAND, 1.0, 0.5), (EXACT, 1.5, 0.75))
    ]  # fmt: skip
    settings = {"slots": 192, "bandwidth": 1e8, "threads": 2, "requests": 2, "new_tokens": 3, "rounds": 1}
    out, page = tmp_path / "old.json", tmp_path / "serving.md"
    out.write_text(json.dumps({"command": "bench_serving.py", "rows": rows, "settings": settings}))
    page.write_text(MARKS)
    assert bench_serving.main(["--show", "--out", str(out), "--page", str(page)]) == 0
    shown = page.read_text()
    assert f"| {EXACT} | 1 | 1.50 | 100 | 200 | 10 | 20 | 0.75 | 2 of 2 | 0 |" in shown
    assert f"| {EXACT} | 1 | 0.38 | 1.50 |" in shown
    assert f"| {EXACT} | 1 | 2 |" in shown
    assert "over all loads of the last round" in shown
    assert "seconds to end" not in shown
    assert bench_serving.main(["--small", "--out", str(out)]) == 2
    assert "is of other settings" in capsys.readouterr().err


def test_what_cannot_be_measured_is_refused_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import bench_serving

    page, broken = tmp_path / "page.md", tmp_path / "broken.json"
    page.write_text("no marks")
    broken.write_text("{")
    for options, expected in (
        (["--page", str(page)], f"{page}: no line <!-- serving -->"),
        (["--sides", "none such"], "no side has any of ['none such'] in its name: transformers, one by one: resident,"),
        (["--vllm-python", str(tmp_path / "python")], "there is no such interpreter"),
        (["--out", str(broken)], f"{broken} holds no result"),
        (["--show"], "--show makes tables of a file: name it with --out"),
    ):
        assert bench_serving.main(["--small", *options]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert expected in lines[0]


def test_orders_turn_and_what_is_given_counts_more_than_small() -> None:
    import bench_serving
    from bench_serving import in_turn, read_arguments

    assert [in_turn([1, 4, 16], number) for number in range(3)] == [[1, 4, 16], [16, 4, 1], [1, 4, 16]]
    args = read_arguments(["--small", "--clients", "3"])
    assert (args.clients, args.requests, args.slots) == ([3], bench_serving.SMALL["requests"], 192)
    assert read_arguments([]).requests == 16


def test_a_resident_side_comes_with_those_compared_with_it() -> None:
    from serving_sides.sides import Setting, chosen, sides

    every = sides(Setting(Path("model"), "checkpoint", 192, 1e8, 2, "python"))
    assert len(every) == 9
    assert [side.name for side in chosen(every, ["batched: exact", "vLLM"])] == [
        "transformers, batched: resident", "transformers, batched: exact", "vLLM: resident", "vLLM: on demand",
        "vLLM: exact",
    ]  # fmt: skip
    assert chosen(every, []) == every
