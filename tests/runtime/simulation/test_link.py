"""The virtual link: order, cancellation and arrival times."""

from __future__ import annotations

import math

import pytest

from expertcast.predictors import ExpertcastError
from expertcast.runtime.simulation.link import VirtualLink

FULL_ONLY = {"full": 1}


@pytest.mark.parametrize(("window", "arrival"), [(1, 2.0), (2, 3.0), (3, 4.0), (8, 4.0)])
def test_misses_overtake_what_has_not_been_issued(window: int, arrival: float) -> None:
    link = VirtualLink(FULL_ONLY, 1.0, window=window)
    forecasts = [link.submit(key, key, urgent=False) for key in range(3)]
    assert [copy.started for copy in forecasts] == [n < window for n in range(3)]
    miss = link.submit(9, 9, urgent=True)
    link.wait(miss)
    assert link.now == arrival
    assert [link.cancel(copy) for copy in forecasts] == [False, False, window == 1]


def test_promoted_copies_go_before_forecasts() -> None:
    link = VirtualLink(FULL_ONLY, 1.0)
    first, second, third = (link.submit(key, key, urgent=False) for key in range(3))
    link.promote(third)
    link.wait(third)
    assert (link.now, first.done, second.done) == (2.0, True, False)
    link.spend(0.5)
    assert not second.done
    link.spend(0.5)
    assert second.done
    link.spend(5.0)
    late = link.submit(3, 3, urgent=False)
    link.wait(late)
    assert link.now == 9.0  # an idle link saves up no bandwidth


def test_cancelled_copies_take_no_time() -> None:
    link = VirtualLink(FULL_ONLY, 1.0)
    first, second, third = (link.submit(key, key, urgent=False) for key in range(3))
    assert link.cancel(second)
    assert not link.cancel(first)
    link.wait(third)
    assert (link.now, first.done, second.done, link.copies, link.busy_s) == (2.0, True, False, 2, 2.0)


def test_a_forecast_is_waited_for_behind_what_is_before_it() -> None:
    link = VirtualLink(FULL_ONLY, 1.0)
    copies = [link.submit(key, key, urgent=False) for key in range(3)]
    link.wait(copies[2])
    assert (link.now, [copy.done for copy in copies]) == (3.0, [True, True, True])


def test_precisions_have_their_own_bytes_and_seconds() -> None:
    """0.5 + 4 / 2 = 2.5 s in full, 0.5 + 1 / 2 = 1 s packed."""
    link = VirtualLink({"full": 4, "int4": 1}, 2.0, 0.5)
    assert (link.copy_s, link.block_bytes("int4")) == (2.5, 1)
    link.wait(link.submit(0, 0, urgent=True))
    assert link.now == 2.5
    link.wait(link.submit(1, 1, urgent=True, precision="int4"))
    assert link.now == 3.5


def test_speeds_that_are_refused() -> None:
    for bandwidth in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ExpertcastError, match="bandwidth="):
            VirtualLink(FULL_ONLY, bandwidth)
    with pytest.raises(ExpertcastError, match="latency=-1"):
        VirtualLink(FULL_ONLY, 1.0, -1.0)
