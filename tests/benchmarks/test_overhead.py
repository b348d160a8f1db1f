"""The overhead script runs the present engine, and its runs copy the experts that they claim."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks.overhead import main


def test_every_run_copies_its_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tokens", "12", "--repetitions", "1", "--allow-dirty", "--out", str(tmp_path / "o.json")]) == 0
    copied = dict(re.findall(r"^\| (\w+) \| .* \| ([.\d]+) \|$", capsys.readouterr().out, re.M))
    assert list(copied) == ["on_demand", "prefetch"]
    assert 0.4 < float(copied["on_demand"]) < float(copied["prefetch"]) < 0.8
