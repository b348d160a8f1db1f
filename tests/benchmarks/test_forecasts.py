"""The grid of forecasts: trained predictors and a resumed file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from benchmarks.forecasts import AUTO, ON_DEMAND, main

FIXED = ("quasi_hidden", "linear", "early_attention", "estimator")


@pytest.mark.slow
def test_settings_of_the_bundled_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, checkpoints = tmp_path / "grid.json", tmp_path / "checkpoints"
    words = ["--allow-dirty", "--out", str(out), "--checkpoints", str(checkpoints), "--train-tokens", "4000"]
    words += ["--turns", "2", "--prompt-tokens", "16", "--links", "2", "--batches", "1", "2"]
    words += ["--repetitions", "2"]
    assert main([*words, "--capacities", "0.25"]) == 0
    kept = json.loads(out.read_text())["runs"]
    assert [run["batch"] for run in kept] == [1, 2]
    for run in kept:
        assert run["identical"]
        sides = run["sides"]
        assert list(sides) == [ON_DEMAND, *FIXED, AUTO]
        assert all(len(side[name]) == 4 for side in sides.values() for name in ("seconds", "waited_s"))
        assert sides["estimator"]["hit_rate"] > sides[ON_DEMAND]["hit_rate"]
    printed = capsys.readouterr().out
    assert re.search(r"^\| 2 \| \d+\.\d \| 25% \| 1 \|", printed, re.MULTILINE)
    assert "Median of auto / best untrained: " in printed
    assert main([*words, "--capacities", "0.25", "0"]) == 0
    runs = json.loads(out.read_text())["runs"]
    assert runs[:2] == kept
    assert [(run["capacity"], run["batch"]) for run in runs[2:]] == [(0.0, 1), (0.0, 2)]
    assert kept[0]["bandwidth"] > 0
    assert {run["bandwidth"] for run in runs} == {kept[0]["bandwidth"]}, "R = 1 is measured once for a file"
