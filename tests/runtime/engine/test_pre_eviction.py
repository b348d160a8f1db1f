"""Slots given up before a layer's routing is known, in the flow that runtime and simulator share (rows D4 and D8)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from expertcast.predictors.base import Forecast
from expertcast.runtime.policies import Policies
from expertcast.runtime.simulation.machine import Case
from expertcast.runtime.simulation.simulator import VirtualRuntime
from tests.runtime.simulation.made import machine, trace

EXPERTS = 8
SLOTS = 6


def runtime(eviction: str = "lru", gap: str = "gap:tau=0.0") -> VirtualRuntime:
    """Two layers of eight experts, two per token, six slots; nothing is prefetched."""
    made = trace([[[0, 1], [0, 1]]] * 2, experts=EXPERTS)
    policies = Policies(eviction=eviction, prefetch="none", pre_eviction=gap)
    return VirtualRuntime(made, Case(policies=policies, slots=SLOTS, machine=machine(2)))


def run(made: VirtualRuntime, layer: int, experts: Sequence[int]) -> None:
    """The layer runs with these experts."""
    keys = [layer * EXPERTS + expert for expert in experts]
    for chunk in made.flow.begin(layer, keys):
        made.residency.wait(chunk)
        made.residency.release(chunk)


def hint(made: VirtualRuntime, rows: list[list[float]]) -> None:
    """A forecast for layer 1 with these softmax probabilities."""
    probability_TE = torch.tensor(rows)
    weights_TK, ids_TK = probability_TE.topk(2)
    forecast = Forecast(layer=1, logits_TE=probability_TE.log(), topk_ids_TK=ids_TK, topk_weights_TK=weights_TK)
    made.flow.hint(forecast, ids_TK.tolist(), weights_TK.tolist())


def held(made: VirtualRuntime, layer: int) -> set[int]:
    return set(made.residency.held(layer))


SHARP = [0.4, 0.3, 0.1, 0.08, 0.05, 0.04, 0.02, 0.01]
"""Predicts experts 0 and 1; no ties."""


@pytest.mark.parametrize(("resident", "left"), [([2, 3], 2), ([2, 3, 4, 5], 4), ([2, 3, 4, 5, 6], 4), ([2, 7, 0], 3)])
def test_no_more_is_given_up_than_is_not_free_already(resident: list[int], left: int) -> None:
    """Delta = 2 (1 where expert 0 is there) is the number of free slots wanted: max(0, Delta - free) are evicted."""
    made = runtime()
    run(made, 1, resident)
    hint(made, [SHARP])
    assert len(held(made, 1)) == left
    assert made.residency.stats.total.evicted == len(resident) - left


def test_what_is_predicted_is_never_given_up() -> None:
    """All slots are taken and the predicted expert 0 is the least recently used one: 2 goes in its place."""
    made = runtime()
    run(made, 1, [0])
    run(made, 1, [2, 3, 4, 5, 6])
    hint(made, [SHARP])
    assert held(made, 1) == {0, 3, 4, 5, 6}


def test_nor_where_nothing_else_could_go() -> None:
    """Both layers' residents are predicted or running: the target is not reached, and nothing predicted pays for it."""
    made = runtime(gap="gap:tau=1.0,r_max=6")
    run(made, 1, [0, 1])
    hint(made, [SHARP])
    assert held(made, 1) == {0, 1}
    assert made.residency.stats.total.evicted == 0


def test_ties_are_counted_up_to_the_first_gap() -> None:
    """After the second expert .005, then .095, then .005: one tie, so one slot; the paper's sum would be two."""
    rows = [[0.4, 0.2, 0.195, 0.1, 0.095, 0.005, 0.003, 0.002]]
    for gap, given_up in (("gap:tau=0.02,r_max=3", 1), ("gap:tau=0.02,r_max=3,literal=true", 2)):
        made = runtime(gap=gap)
        run(made, 1, [0, 1, 4, 5, 6, 7])
        hint(made, rows)
        assert made.residency.stats.total.evicted == given_up, gap


TOKENS = [
    [0.50, 0.30, 0.11, 0.01, 0.02, 0.02, 0.02, 0.02],
    [0.30, 0.50, 0.01, 0.08, 0.04, 0.03, 0.02, 0.02],
]
"""Both predict 0 and 1; behind them .34 in the mean, .68 in the sum, .39 between maxima, .19 in the first row."""


@pytest.mark.parametrize(("tau", "ties"), [(0.35, 1), (0.33, 0)])
def test_the_prior_is_the_mean_over_tokens(tau: float, ties: int) -> None:
    made = runtime(gap=f"gap:tau={tau},r_max=1")
    run(made, 1, [0, 1, 4, 5, 6, 7])
    hint(made, TOKENS)
    assert made.residency.stats.total.evicted == ties


def test_importance_weighs_the_mean_over_tokens() -> None:
    """Expert 2 has .0475 in the mean and .09 at most, expert 3 .05 twice: one slot is wanted, and 2 goes."""
    rows = [
        [0.40, 0.20, 0.090, 0.05, 0.06, 0.06, 0.06, 0.080],
        [0.40, 0.20, 0.005, 0.05, 0.08, 0.08, 0.08, 0.105],
    ]
    made = runtime(eviction="importance:alpha=0.0")
    run(made, 1, [0, 2, 3, 4, 5, 6])
    hint(made, rows)
    assert held(made, 1) == {0, 3, 4, 5, 6}
