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


def mean_ms(ratio: float, misses: str, accuracy: float | None, link: str, held_back: float = 2.0) -> float:
    """With the forecasts that the governor chooses."""
    return statistics.fmean(
        tokens_ms("gpt-oss-120b", ratio, misses, accuracy, link, held_back=held_back, forecasts="auto")
    )


@pytest.mark.parametrize(("ratio", "link"), [(5.0, STEADY), (10.0, STEADY), (10.0, HOSTILE)])
@pytest.mark.parametrize("misses", ["copy", "auto"])
def test_wrong_forecasts_cost_little_from_the_first_token_on(misses: str, ratio: float, link: str) -> None:
    """The governor tells within a layer or two that they find nothing."""
    assert mean_ms(ratio, misses, 0.0, link) <= 1.015 * mean_ms(ratio, misses, None, link)


@pytest.mark.parametrize("accuracy", [1.0, 0.9])
@pytest.mark.parametrize(
    ("ratio", "link", "held_back", "most"),
    [(2.0, STEADY, 10.0, 0.86), (5.0, STEADY, 2.0, 1.01), (10.0, HOSTILE, 2.0, 1.015)],
)
def test_forecasts_gain_beside_auto_where_layers_wait_for_copies(
    ratio: float, link: str, held_back: float, most: float, accuracy: float
) -> None:
    """A host at half the device's speed leaves nothing to wait for: the governor makes none."""
    assert mean_ms(ratio, "auto", accuracy, link, held_back) <= most * mean_ms(ratio, "auto", None, link, held_back)
