"""The roofline picture's numbers, by hand."""

from __future__ import annotations

import pytest

from expertcast.predictors import ExpertcastError
from expertcast.runtime.drafts.costs import roofline
from tests.runtime.drafts.test_governor import COPIES
from tests.runtime.drafts.world import Governor, Run


def test_points_by_hand() -> None:
    # a link of 1 GB/s; a plain step computes 10 ms and waits 10; three tokens in 20 + 4 ms; five in 30 + 0 ms
    plain, two, four = roofline([1.0, 3.0, 5.0], [0.010, 0.020, 0.030], [0.020, 0.024, 0.030], 1e9)
    assert (plain.bytes_waited, plain.intensity) == pytest.approx((10e6, 1e-7))
    assert (plain.rate, plain.compute_roof, plain.io_roof(1e9)) == pytest.approx((50.0, 100.0, 100.0))
    assert (two.bytes_waited, two.intensity) == pytest.approx((4e6, 7.5e-7))
    assert (two.rate, two.compute_roof, two.io_roof(1e9)) == pytest.approx((125.0, 150.0, 750.0))
    assert (four.rate, four.compute_roof) == pytest.approx((5 / 0.03, 5 / 0.03))
    assert (four.intensity, four.io_roof(1e9)) == (None, None)
    for point in (plain, two):
        assert 1 / point.rate == pytest.approx(1 / point.compute_roof + 1 / (point.io_roof(1e9) or 0.0))
    assert two.as_dict()["length"] == 1


def test_a_governor_knows_its_points() -> None:
    run = Run(COPIES, Governor(12, COPIES.copy_s, longest=8), 0)
    for _ in range(200):
        run.cycle()
    block_bytes = 1_000_000  # in 1 ms: 1 GB/s
    points = run.governor.roofline("int4", block_bytes)
    assert [point.length for point in points] == list(range(9))
    best = max(points, key=lambda point: point.rate)
    assert best.length == 5
    assert best.rate == pytest.approx(run.rate, rel=0.1)
    # plain steps: 30 ms, of which 21 compute
    assert points[0].bytes_waited == pytest.approx(9e6, rel=0.2)
    assert points[0].rate == pytest.approx(1 / 0.030, rel=0.05)


def test_refusals() -> None:
    with pytest.raises(ExpertcastError, match=r"bandwidth=0, compute_s=\[1.0\]: give numbers above 0"):
        roofline([1.0], [1.0], [1.0], 0)
