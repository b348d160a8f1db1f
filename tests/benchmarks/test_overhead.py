"""The overhead script runs the present engine, and its runs copy the experts that they claim."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks.overhead import main


def test_every_run_copies_its_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tokens", "12", "--repetitions", "1", "--allow-dirty", "--out", str(tmp_path / "o.json")]) == 0
    rows = re.findall(r"^\| (\w+) \| (\d+) \| .* \| ([.\d]+) \|$", capsys.readouterr().out, re.M)
    copied = {(name, layers): float(share) for name, layers, share in rows}
    assert list(copied) == [("on_demand", "6"), ("on_demand", "48"), ("prefetch", "6"), ("prefetch", "48")]
    for layers in ("6", "48"):
        assert 0.3 < copied["on_demand", layers] < copied["prefetch", layers] < 0.9
    for name in ("on_demand", "prefetch"):
        assert copied[name, "48"] == pytest.approx(copied[name, "6"], rel=0.05)  # equal work per layer
