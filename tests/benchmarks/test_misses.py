"""The choice of `misses="auto"` in virtual time."""

from __future__ import annotations

import statistics

import pytest
from benchmarks.misses import HOSTILE, RANDOM, STEADY, read_arguments, tokens_ms


@pytest.mark.parametrize("link", [STEADY, HOSTILE])
@pytest.mark.parametrize("ratio", [2.0, 5.0])
@pytest.mark.parametrize("held_back", ["2", "40"])
def test_auto_is_no_slower_than_copy_or_host(held_back: str, ratio: float, link: str) -> None:
    """Over a steady link, one whose speed changes tenfold, and beside a host that is of no use."""
    args = read_arguments(["--held-back", held_back, "--new-tokens", "48", "--phase", "12"])
    copy, host, auto = (
        statistics.fmean(tokens_ms(args, "gpt-oss-120b", ratio, 0.25, misses, None, link))
        for misses in ("copy", "host", "auto")
    )
    assert auto <= 1.02 * min(copy, host)
    assert held_back != "2" or ratio < 5 or auto <= 0.7 * copy


def test_random_forecasts_leave_auto_faster_than_copies() -> None:
    args = read_arguments(["--new-tokens", "32"])
    copy = statistics.fmean(tokens_ms(args, "gpt-oss-120b", 5.0, 0.25, "copy", None, STEADY))
    auto = statistics.fmean(tokens_ms(args, "gpt-oss-120b", 5.0, 0.25, "auto", RANDOM, STEADY))
    assert auto <= 0.7 * copy
