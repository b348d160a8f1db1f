"""The day a GPU is there: steps that are cut off, fail, overrun or are left out, and tests that hang."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from expertcast.predictors.errors import ExpertcastError

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "scripts/gpu_day.py"


def read(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def runs(process: int) -> bool:
    """Whether it is there and no zombie."""
    try:
        return bool(Path(f"/proc/{process}/cmdline").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def day(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("gpu_day")


@pytest.fixture
def steps(day: ModuleType) -> Callable[..., list[Any]]:
    def made(*names: str, seconds: float = 60) -> list[Any]:
        module = "tests.scripts.gpu_day_step"
        return [
            day.Step(number=number, name=name, module=module, seconds=seconds, small_seconds=seconds)
            for number, name in enumerate(names, start=1)
        ]

    return made


@pytest.fixture
def run(day: ModuleType, tmp_path: Path) -> Callable[..., int]:
    def call(steps: list[Any], *words: str) -> int:
        status: int = day.main(["--out", str(tmp_path), "--small", *words], steps)
        return status

    return call


@pytest.mark.slow
def test_goes_on_where_it_was_cut_off(
    day: ModuleType, steps: Callable[..., list[Any]], run: Callable[..., int], tmp_path: Path
) -> None:
    code = (
        "import gpu_day; from gpu_day import Step; m = 'tests.scripts.gpu_day_step'\n"
        "make = lambda n, name: Step(number=n, name=name, module=m, seconds=60, small_seconds=20)\n"
        f"gpu_day.main(['--out', {str(tmp_path)!r}, '--small'], [make(1, 'works'), make(2, 'hangs')])"
    )
    path = os.pathsep.join([str(ROOT / "scripts"), str(ROOT / "src")])
    cut = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": path})
    patience = time.monotonic() + 120
    while not (tmp_path / "2-hangs.json").exists() or "child" not in read(tmp_path, "2-hangs")["result"]:
        assert time.monotonic() < patience
        time.sleep(0.1)
    cut.send_signal(signal.SIGKILL)
    cut.wait()
    os.kill(read(tmp_path, "2-hangs")["result"]["child"], signal.SIGKILL)
    before = read(tmp_path, "1-works")
    assert read(tmp_path, "2-hangs")["status"] == "running"
    assert read(tmp_path, "2-hangs")["result"]["begun"]
    (tmp_path / "2-hangs.json").rename(tmp_path / "2-works.json")  # the same step, mended
    assert run(steps("works", "works")) == 0
    assert read(tmp_path, "1-works") == before
    assert read(tmp_path, "2-works")["status"] == "done"
    assert run(steps("works"), "--again") == 0
    assert read(tmp_path, "1-works") != before


@pytest.mark.slow
def test_what_fails_is_said_and_the_rest_goes_on(
    steps: Callable[..., list[Any]], run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(steps("fails", "dies", "half", "works")) == 1
    fails = read(tmp_path, "1-fails")
    assert fails["status"] == "failed"
    assert fails["error"][-1] == "ValueError: what was wrong"
    assert read(tmp_path, "2-dies")["status"] == "failed"
    assert read(tmp_path, "2-dies")["result"]["begun"]
    half = read(tmp_path, "3-half")
    assert half["status"] == "done"
    assert not half["passed"]
    assert list(half["result"]["errors"]) == ["this"]
    assert half["result"]["errors"]["this"][-1].startswith("ZeroDivisionError")
    assert read(tmp_path, "4-works")["passed"]
    assert "1 fails: failed after" in capsys.readouterr().out
    assert run(steps("fails", "dies", "half", "works"), "--steps", "4") == 0


@pytest.mark.slow
def test_a_step_that_overruns_is_stopped_with_its_children(
    steps: Callable[..., list[Any]], run: Callable[..., int], tmp_path: Path
) -> None:
    assert run(steps("hangs", "works", seconds=15)) == 1
    record = read(tmp_path, "1-hangs")
    assert record["status"] == "overran"
    assert any("gpu_day_step.py" in line for line in record["error"]), "where it stood"
    assert (
        not Path(f"/proc/{record['result']['child']}/cmdline").exists()
        or not Path(f"/proc/{record['result']['child']}/cmdline").read_bytes()
    ), "its child runs on"
    assert read(tmp_path, "2-works")["passed"]


def test_a_step_that_cannot_end_in_time_is_not_begun(
    steps: Callable[..., list[Any]], run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(steps("works"), "--minutes", "0.9") == 0
    assert "1 works: left out" in capsys.readouterr().out
    assert not (tmp_path / "1-works.json").exists()


def test_results_of_another_device_are_not_mixed_in(
    steps: Callable[..., list[Any]], run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "1-works.json").write_text(json.dumps({"device": "cuda", "status": "done", "passed": True}))
    assert run(steps("works")) == 2
    assert "give another --out" in capsys.readouterr().err


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for words, expected in (
        (["--steps", "9", "--out", "x"], "invalid choice"),
        ([], "give --out"),
        (["--out", str(tmp_path / "file")], "file"),
        (["--out", str(tmp_path), "--wheels", str(tmp_path / "none")], "no such folder"),
    ):
        run = subprocess.run([sys.executable, SCRIPT, *words], cwd=ROOT, capture_output=True, text=True, check=False)
        assert run.returncode == 2
        assert expected in run.stderr
        assert len(run.stderr.splitlines()) == 1


def test_a_test_that_hangs_or_crashes_costs_itself_only(
    day: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_tests = importlib.import_module("gpu_steps.gpu_tests")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "scripts"), str(ROOT / "src")]))
    monkeypatch.setattr(gpu_tests, "TEST_S", 5)
    monkeypatch.setattr(gpu_tests, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_tests, "SMALL_TESTS", "cases.py")
    shutil.copy(Path(__file__).with_name("gpu_day_cases.py"), tmp_path / "cases.py")
    step = day.Step(number=2, name="tests", module="", seconds=200)
    given = gpu_tests.Day(step, tmp_path, device="cpu", command="", seconds=200)
    assert not gpu_tests.run(given)
    found = {line["test"].partition("::test_")[2]: line for line in gpu_tests.outcomes(tmp_path / "2-tests.jsonl")}
    assert {name: line["outcome"] for name, line in found.items()} == {
        "first": "passed",
        "hangs": "killed",
        "crashes": "killed",
        "fails": "failed",
        "skips": "skipped",
        "last": "passed",
    }
    assert "so it does" in "".join(found["fails"]["why"])
    result = read(tmp_path, "2-tests")["result"]
    assert result["outcomes"] == {"passed": 2, "killed": 2, "failed": 1, "skipped": 1}


def test_layers_are_cut_to_memory_and_time(day: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = importlib.import_module("gpu_steps.rows")
    step = day.Step(number=4, name="rows", module="", seconds=400)
    given = importlib.import_module("gpu_steps.day").Day(step, tmp_path, device="cuda", command="", seconds=400)

    def check(_name: str, *, layers: int) -> None:
        if layers > 32:
            raise ExpertcastError("no room")

    monkeypatch.setattr(rows, "_layer_seconds", lambda _day: 1.0)
    monkeypatch.setattr(rows, "check_shape", lambda _name, *, layers: None)
    assert rows.cut(given, 400) == rows.Cut(48, None)
    assert rows.cut(given, 400, most=24) == rows.Cut(24, None)
    by_time = rows.cut(given, 120)
    assert by_time.layers == 24
    assert by_time.because == "clock: 32 layers take about 132 s, 120 s are left"
    monkeypatch.setattr(rows, "check_shape", check)
    assert rows.cut(given, 400) == rows.Cut(32, "memory: no room")
    with pytest.raises(ExpertcastError, match="not even 4 layers: clock"):
        rows.cut(given, 1)
