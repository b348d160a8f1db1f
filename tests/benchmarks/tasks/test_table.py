"""The table of tasks: rows are measured once, kept, and gone on with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from expertcast.checkpoints.checkpoint import save_predictor
from expertcast.data.traces import TraceDataset
from expertcast.training.scoring import Fitted

ROOT = Path(__file__).resolve().parents[3]


def run(traces: TraceDataset, out: Path, checkpoint: Path, *more: str) -> subprocess.CompletedProcess[str]:
    small = ["--count", "4", "--windows", "1", "--slots", "300", "--traces", str(traces.folder), "--out", str(out)]
    command = [sys.executable, "-m", "benchmarks.tasks", *small, "--predictor", str(checkpoint), *more]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.slow
def test_rows_are_measured_once(
    reference_traces: TraceDataset, fitted_predictors: dict[str, Fitted], tmp_path: Path
) -> None:
    estimator, out = fitted_predictors["estimator"].predictor, tmp_path / "tasks.json"
    save_predictor(estimator, tmp_path / "estimator", view=reference_traces.view)
    done = run(reference_traces, out, tmp_path / "estimator", "--only", "router", "--low-recall", "0")
    assert done.returncode == 0, done.stderr
    first = json.loads(out.read_text())
    assert list(first["rows"]) == ["resident", "router"]
    resident, router = first["rows"].values()
    assert resident["kl"] == 0 < router["kl"]
    assert set(resident["tasks"]) - set(router["tasks"]) == {"copying_control"}
    assert all(score["questions"] == len(score["answers"]) == 4 for score in router["tasks"].values())
    only = ("--only", "hybrid, paper's rule", "router", "--low-recall", "0")
    again = run(reference_traces, out, tmp_path / "estimator", *only)
    assert again.returncode == 0, again.stderr
    second = json.loads(out.read_text())
    assert second["rows"]["router"] == router
    assert second["rows"]["hybrid, paper's rule"]["same_as"] == "router", "with low_recall 0 nothing is replaced"
    assert {choice["predictor"] for choice in second["chosen"]["hybrid_paper"]} == {"quasi_hidden"}
    assert [line.split(" | ")[0] for line in again.stdout.splitlines()] == [
        "| run", "| ---", "| resident", "| router", "| hybrid, paper's rule"
    ]  # fmt: skip
