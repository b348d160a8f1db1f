"""The grid of forecasts: one setting, with predictors that are trained for it; given again, it goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.forecasts import main


@pytest.mark.slow
def test_one_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "grid.json"
    words = [
        "--out",
        str(out),
        "--train-tokens",
        "4000",
        "--new-tokens",
        "6",
        "--repetitions",
        "1",
        "--capacities",
        "0.25",
    ]
    checkpoints = tmp_path / "checkpoints"
    assert main([*words, "--links", "2", "--checkpoints", str(checkpoints)]) == 0
    (first,) = json.loads(out.read_text())["runs"]
    assert first["identical"]
    assert set(first["ms"]) == {"on_demand", "quasi_hidden", "linear", "early_attention", "estimator", "auto"}
    assert first["hit_rate"]["estimator"] > first["hit_rate"]["on_demand"]
    assert "| 2 | 25% | 1 |  |" in capsys.readouterr().out
    assert main([*words, "--links", "2", "5", "--checkpoints", str(checkpoints)]) == 0
    kept, second = json.loads(out.read_text())["runs"]
    assert kept == first
    assert second["link"] == "5"
