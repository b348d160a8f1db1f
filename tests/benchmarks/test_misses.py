"""The benchmark of misses runs the sides that its page shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import misses


def test_every_side_runs_with_the_same_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"hidden_size": 64, "moe_intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2,
             "head_dim": 16}  # fmt: skip
    monkeypatch.setattr(misses, "SIZES", {**misses.SIZES, **small})
    path = tmp_path / "m.json"
    words = ["--allow-dirty", "--out", str(path), "--repetitions", "1", "--links", "2", "--turns", "1"]
    assert misses.main(words) == 0
    assert misses.main(words) == 0  # nothing is left to measure
    printed = capsys.readouterr().out
    assert "| 2 | steady |" in printed
    assert "| 2 | tenfold |" in printed
    for run in json.loads(path.read_text())["runs"]:
        assert list(run["tokens_ms"]) == list(misses.SIDES)
        assert all(len(tokens) == misses.TURN for tokens in run["tokens_ms"].values())
