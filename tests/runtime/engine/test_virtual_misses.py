"""The choice of `misses="auto"` in virtual time."""

from __future__ import annotations

import statistics

import pytest

from tests.runtime.engine.virtual_misses import HOSTILE, STEADY, tokens_ms


@pytest.mark.parametrize("link", [STEADY, HOSTILE])
@pytest.mark.parametrize("ratio", [2.0, 5.0])
@pytest.mark.parametrize("held_back", [2.0, 40.0])
def test_auto_is_no_slower_than_copy_or_host(held_back: float, ratio: float, link: str) -> None:
    """Over a steady link, one whose speed changes tenfold, and beside a host that is of no use."""
    copy, host, auto = (
        statistics.fmean(tokens_ms("gpt-oss-120b", ratio, misses, None, link, held_back=held_back, new_tokens=48))
        for misses in ("copy", "host", "auto")
    )
    assert auto <= 1.02 * min(copy, host)
    assert held_back > 2 or ratio < 5 or auto <= 0.7 * copy


def test_random_forecasts_leave_auto_faster_than_copies() -> None:
    copy = statistics.fmean(tokens_ms("gpt-oss-120b", 5.0, "copy", None, STEADY, new_tokens=32))
    auto = statistics.fmean(tokens_ms("gpt-oss-120b", 5.0, "auto", 0.0, STEADY, new_tokens=32))
    assert auto <= 0.7 * copy
