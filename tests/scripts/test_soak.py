"""The soak in small form: random deployments give the resident model's bits, and what hangs or differs is noticed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "soak.py"


def _soak(*words: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, words)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


def test_a_few_deployments(tmp_path: Path) -> None:
    run = _soak("--requests", 1000, "--seed", 27, "--json", tmp_path / "found.json")
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["requests"] >= 1000
    assert found["cases"] == found["right"] == run.stdout.count(": right, ") > 0
    assert (found["wrong"], found["crashed"], found["hung"], found["failures"]) == (0, 0, 0, [])


def test_what_hangs_is_counted_and_named(tmp_path: Path) -> None:
    run = _soak("--only", 0, "--seconds", 0.01, "--json", tmp_path / "found.json")
    assert run.returncode == 1
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["hung"], found["crashed"], found["right"]) == (1, 0, 0)
    assert "Timeout (" in run.stderr


@pytest.mark.parametrize(
    ("logits", "dtype", "rounding", "ties", "line"),
    [
        ([0.0, 3.0, 3.0], "bf16", 0.0, {"ties": 1}, ""),
        ([0.0, 3.0, 2.0], "bf16", 1.0, {"near ties": 1}, ""),
        ([0.0, 3.0, 2.0], "bf16", 0.9, {}, "row 0 parts at new token 0, where the plain model's token leads by 1.0"),
        ([0.0, 3.0, 3.0], "fp32", 9.0, {}, "row 0 parts at new token 0, where the plain model's token leads by 0.0"),
    ],
)
def test_drafts_part_where_rounding_decides(
    logits: list[float], dtype: str, rounding: float, ties: dict[str, int], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from soak import parted

    plain = torch.tensor([[7, 1]]), [torch.tensor([logits])]
    assert parted(plain, torch.tensor([[7, 1]]), dtype, lambda *_: rounding) == ({}, "")
    assert parted(plain, torch.tensor([[7, 2]]), dtype, lambda *_: rounding) == (ties, line)
