"""The event model against closed forms (row B11)."""

from __future__ import annotations

import random

import pytest

from expertcast.runtime.simulation.trace import Trace
from tests.runtime.made import Setting, decoding, layer_times, perfect, replay, routings

LAYERS, EXPERTS, TOP_K, STEPS = 4, 6, 2, 5


def _trace(seed: int, layers: int = LAYERS, steps: int = STEPS) -> Trace:
    choose = random.Random(seed)

    def routing() -> list[list[int]]:
        return [[layer * EXPERTS + e for e in choose.sample(range(EXPERTS), TOP_K)] for layer in range(layers)]

    return decoding(routing(), [routing() for _ in range(steps)], experts=EXPERTS, top_k=TOP_K)


# ---- closed forms: no cache, every step alike


@pytest.mark.parametrize("copy_s", [0.01, 0.5, 1.0, 1.5, 4.0])
def test_on_demand_is_the_sum(copy_s: float) -> None:
    """B11: T_od = sum of compute and copy."""
    before, experts = [1.0, 0.25, 2.0, 0.5], [0.5, 1.0, 0.125, 3.0]
    got = replay(_trace(0), layer_times(before, experts), Setting(slots=12, copy_s=copy_s, cache=False))
    assert got.steps_s == pytest.approx([sum(before) + sum(experts) + LAYERS * TOP_K * copy_s] * STEPS)
    total = got.decode.total
    assert total.waited_s == pytest.approx(STEPS * LAYERS * TOP_K * copy_s)
    assert (got.decode.hit_rate, total.misses, total.prefetched) == (0.0, STEPS * LAYERS * TOP_K, 0)


@pytest.mark.parametrize("copy_s", [0.01, 0.5, 0.75, 1.0, 4.0])
@pytest.mark.parametrize("forecast_s", [0.0, 0.375])
def test_perfect_prefetch_is_the_sum_of_the_larger(copy_s: float, forecast_s: float) -> None:
    """B11: T_pf = sum of max(compute, copy of the next layer), the first copy exposed and the last dropped (trap 9)."""
    before, experts = [1.0, 0.25, 2.0, 0.5], [0.5, 1.0, 0.125, 3.0]
    trace = _trace(1)
    times = layer_times(before, experts, forecast=forecast_s)
    got = replay(trace, times, Setting(slots=12, copy_s=copy_s, cache=False), perfect(trace))
    copies = TOP_K * copy_s
    total = before[0] + max(copies, forecast_s) + experts[-1]
    for layer in range(LAYERS - 1):
        cost = forecast_s if layer + 1 < LAYERS - 1 else 0.0  # nothing is forecast at the last layer
        # the next layer's copies go out when this layer's forecast is there, or behind this layer's own copies
        link_starts_late = layer == 0 and forecast_s > copies
        assert not link_starts_late or copies <= experts[layer] + before[layer + 1] + cost
        total += max(experts[layer] + before[layer + 1] + cost, copies)
    assert got.steps_s == pytest.approx([total] * STEPS)
    assert (got.decode.total.misses, got.decode.total.prefetched) == (STEPS * TOP_K, STEPS * (LAYERS - 1) * TOP_K)


def test_everything_fits() -> None:
    trace = _trace(2)
    whole = [list(range(EXPERTS * n, EXPERTS * (n + 1))) for n in range(LAYERS)]
    every = decoding(whole, routings(trace), experts=EXPERTS, top_k=TOP_K)
    got = replay(every, layer_times([1.0] * LAYERS, [2.0] * LAYERS), Setting(slots=LAYERS * EXPERTS, copy_s=9.0))
    assert got.steps_s == [3.0 * LAYERS] * STEPS
    assert (got.decode.hit_rate, got.decode.total.prefetched) == (1.0, 0)
