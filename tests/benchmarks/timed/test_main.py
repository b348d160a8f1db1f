"""The simulated benchmark runs in its small form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.timed import __main__ as timed

KEYS = {*timed.KEYS, "accuracy", "efficiency", "tpot_over_bound"}


@pytest.mark.slow
def test_the_small_form(tmp_path: Path) -> None:
    out = tmp_path / "timed.json"
    assert timed.main(["--small", "--allow-dirty", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert len(found["runs"]) == 4 * len(timed.ACCURACIES)
    assert all(row.keys() >= KEYS for row in found["runs"])
    assert all(row["tpot_over_bound"] > 0.99 for row in found["runs"])
