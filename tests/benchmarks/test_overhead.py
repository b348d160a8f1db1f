"""The overhead script runs the present engine, and its runs copy the experts that they claim."""

from __future__ import annotations

import cProfile
import pstats
import re
from pathlib import Path

import pytest
from benchmarks.overhead import LAYERS, SHAPE, main, run
from benchmarks.timed.routing import recorded


def test_every_run_copies_its_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tokens", "12", "--repetitions", "1", "--allow-dirty", "--out", str(tmp_path / "o.json")]) == 0
    rows = re.findall(r"^\| (\w+) \| (\d+) \| .* \| ([.\d]+) \|$", capsys.readouterr().out, re.M)
    copied = {(name, layers): float(share) for name, layers, share in rows}
    assert list(copied) == [("on_demand", "6"), ("on_demand", "48"), ("prefetch", "6"), ("prefetch", "48")]
    for layers in ("6", "48"):
        assert 0.3 < copied["on_demand", layers] < copied["prefetch", layers] < 0.9
    for name in ("on_demand", "prefetch"):
        assert copied[name, "48"] == pytest.approx(copied[name, "6"], rel=0.05)  # equal work per layer


def calls(tokens: int, *, forecasts: bool) -> int:
    """Count the calls of functions, those of C included, while an engine is built and runs so many steps."""
    tables, profile = recorded(SHAPE, prompt=1, new_tokens=tokens, accuracy=0.9), cProfile.Profile()
    profile.runcall(run, tables, LAYERS[0], forecasts=forecasts)
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("forecasts", "most"), [(False, 295), (True, 385)])
def test_calls_per_layer_and_token(forecasts: bool, most: int) -> None:
    """It was 340, and 422 with forecasts, when each of the experts' calls passed through layers of small functions."""
    calls(2, forecasts=forecasts)
    found = calls(48, forecasts=forecasts) - calls(24, forecasts=forecasts)
    assert found <= most * 24 * LAYERS[0]
