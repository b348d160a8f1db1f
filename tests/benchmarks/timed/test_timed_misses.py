"""Misses that the host computes, in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.benchmarks.timed.timed_misses import CASE, measured


@pytest.mark.parametrize("link", ["pcie3", "pcie4"])
def test_auto_is_no_slower_than_the_better_mode_and_near_the_bound(link: str) -> None:
    """Slot numbers wait for copies that have begun: copies for later steps must end before the next layer."""
    for row in measured(link, replace(CASE, layers=8)):
        assert row["auto_ms"] <= 1.03 * min(row["copy_ms"], row["host_ms"]), row
        assert row["bound_ms"] <= row["auto_ms"] <= 1.2 * row["bound_ms"], row
