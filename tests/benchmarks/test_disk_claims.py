"""The page of claims about experts on a disk: that it runs, and that what is committed says what its rows say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.disk_claims.__main__ import JSON, PAGE, main, page
from benchmarks.disk_claims.claims import CLAIMS, claims
from benchmarks.study.found import VERDICTS

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_the_page_is_its_rows() -> None:
    result = json.loads((BENCHMARKS / JSON).read_text())
    assert not result["quick"]
    assert result["claims"] == claims(result)
    assert (BENCHMARKS / PAGE).read_text() == page(result)


@pytest.mark.slow
def test_a_quick_run(tmp_path: Path) -> None:
    """What is proven and enumerated holds at any size; the rest is judged at all."""
    assert main(["--out", str(tmp_path), "--quick"]) == 0
    result = json.loads((tmp_path / JSON).read_text())
    judged = {each["source"]: each["verdict"] for each in result["claims"]}
    assert len(result["claims"]) == len(CLAIMS) == 15
    assert set(judged.values()) <= set(VERDICTS[:3])
    assert judged["Theorem 3.1; row E10"] == judged["Algorithm 2; rows E15, E16"] == "held"
    assert judged["equation 23; row E17, trap 1"] == "did not hold"
    assert result["chances"]["fit_error"] < 1e-8
    assert result["orders"]["mended_above_optimum"] == 0
    assert all(row["of_first_eight"] <= 1.03 for row in result["planned"])
    assert (tmp_path / PAGE).read_text() == page(result)
