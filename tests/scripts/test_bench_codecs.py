"""The codecs' benchmark runs, and says of each codec what the codec's own sizes say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripts import bench_codecs


def test_a_short_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_codecs, "HIDDEN", 512)
    monkeypatch.setattr(bench_codecs, "INTERMEDIATE", 256)
    out = tmp_path / "codecs.json"
    assert bench_codecs.main(["--repetitions", "1", "--every", "128", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    ratios = {(row["experts"], row["codec"]): row["ratio"] for row in found["results"]}
    assert ratios["reference", "raw"] == 1.0
    assert 0.66 < ratios["reference", "bitsplit"] < 0.69
    large = {codec: ratio for (experts, codec), ratio in ratios.items() if experts != "reference"}
    assert large["mxfp4"] == 17 / 64
    assert large["fp8"] == pytest.approx(0.5, abs=0.01)
    assert large["bitsplit"] == pytest.approx(found["bounds"]["normal, 12.6 MB"]["each"], abs=0.02)
    assert len(capsys.readouterr().out.splitlines()) == len(ratios) + 2
