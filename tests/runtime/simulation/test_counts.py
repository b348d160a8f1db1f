"""Exact counts of every miss, routing, prefetch and pre-eviction policy on traces worked out by hand.

Counts of the eviction policies are in tests/runtime/policies/test_eviction.py. All evict by lru. The first
token is prefilled; each later one is a decode step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from expertcast.predictors.base import Forecast
from expertcast.predictors.view import ModelShape, MoEView
from expertcast.runtime.policies import MISS, PRE_EVICTION, PREFETCH, ROUTING, Policies
from expertcast.runtime.simulation.machine import Machine, constant_times
from expertcast.runtime.simulation.trace import Hints, Routes, Trace, trace_of
from tests.runtime.simulation.made import simulate
from tests.training.synthetic import tiny_view

BYTES = {"full": 8, "int8": 4, "int4": 2, "int2": 1}
Counts = tuple[int, int, int, int, int, int]
"""Hits, misses, collisions, evicted, skipped and bytes of the decode steps."""

# One layer of five experts, K = 3, three slots. Weights .7 .25 .05: 2.1, .75 and .15 times a token's mean. The router's
# probabilities are .4 .3 .1 for its choice, .08 and .02 for the others.
#
#        needs     the others
#   t0   0 1 2     3 4
#   t1   0 1 3     2 4
#   t2   3 0 4     1 2
#   t3   1 2 0     3 4
#
# fetch: t1 misses 3 for 2; t2 misses 4 for 1; t3 misses 1 and 2 for 3 and 4.
# fetch_lowest: the same in 2 bytes each.
# cascade: 0 1 2 come in full, int4, int2. t1 3 int2. t2 3 again in full, 4 int2. t3 1 in full, 2 int4.
#   1 + 9 + 10 bytes.
# drop: the prefill leaves 2 out. t1 drops 3. t2 fetches 3 into the free slot, drops 4. t3 1 and 0 are there, 2 comes
#   for 3.
# drop_cascade: 0 full, 1 int4, 2 dropped. t1 drops 3. t2 3 in full, drops 4. t3 1 again in full, 2 int4 for 3.
#   8 + 10 bytes.
# substitute: t1 2 (.08) stands in for 3 (.1). t2 3 (.4) finds nothing above .2 and comes for 2; 1 (.08) stands in for
#   4 (.1). t3 3 (.08) is not half of 2 (.3): 2 comes for 3.
NEEDED = ((0, 1, 2, 3, 4), (0, 1, 3, 2, 4), (3, 0, 4, 1, 2), (1, 2, 0, 3, 4))
MISSES: dict[str, Counts] = {
    "fetch": (5, 4, 0, 4, 0, 32),
    "fetch_lowest": (5, 4, 0, 4, 0, 8),
    "cascade": (4, 5, 0, 4, 0, 20),
    "drop": (5, 2, 0, 1, 2, 16),
    "drop_cascade": (4, 3, 0, 1, 2, 18),
    "substitute": (7, 2, 0, 2, 2, 16),
}

# One layer of a Qwen3-MoE with eight experts, K = 2, three slots; logits that are not listed are 0.
#
#   t0   0: 8   1: 7
#   t1   2: 8   3: 6   1: 5
#   t2   4: 8   5: 7   0: 2
#   t3   4: 8   5: 7
#
# standard: t1 misses 2 (free slot) and 3 (for 0), t2 4 and 5, t3 hits both.
# cache_aware: half of the range of 8 is the bonus. t1 1 is at 9 and takes the place of 3: 1 hit, 2 into the free slot.
#   t2 0 gets 6 and stays behind 5: misses 4 and 5 for 0 and one more. t3 hits both.
# budget: t0 fits three slots. t1 has room for one: 2, without 3. t2 has none: its first comes for 0, without 5.
#   t3 4 is there, 5 has no room.
LOGITS = ({0: 8.0, 1: 7.0}, {2: 8.0, 3: 6.0, 1: 5.0}, {4: 8.0, 5: 7.0, 0: 2.0}, {4: 8.0, 5: 7.0})
ROUTINGS: dict[str, Counts] = {
    "standard": (2, 4, 0, 3, 0, 32),
    "cache_aware:strength=0.5": (3, 3, 0, 2, 1, 24),
    "budget": (1, 2, 0, 1, 3, 16),
}

# Two layers of four experts, K = 1: keys 0 to 3 and 4 to 7. A copy takes half a second, and two seconds lie between the
# forecast for layer 1 and its routing. Layer 0 needs expert 0 always.
#
#        layer 1 needs   forecast for it: probabilities of experts 0 to 3
#   t0   0
#   t1   1               .02 .60 .30 .08
#   t2   3               .05 .10 .80 .05
#   t3   2               .30 .10 .20 .40
#
# Four slots hold keys 0 and 4 after t0. Selections, the experts that are copied, and what layer 1 misses:
# none           -                           5 (free), 7 (free), 6 (for 4)
# top_k          1 (free); 2 (free); -       -, 7 (for 4), -; key 7 is resident when t3 needs it
# overfetch 2    1 2 (free); -; 0            -, 7 (for 4), 6 (for 5): t3's 0 took the slot of key 6, the oldest for it
#                                            came in t1, unused, before 5 was used: a collision
# percentile     1 2 (free); -; 0            scores over the first expert's: of the 4, 8 and 12 so far the 60th
#                percentile is .5, which 1 and 2 reach in t1, 2 in t2 and 3, 0 and 2 in t3. What a forecast names is
#                not given up for it: 0 comes for 5, 2 (key 6) is there
PLANNED = ((0.25, 0.25, 0.25, 0.25), (0.02, 0.60, 0.30, 0.08), (0.05, 0.10, 0.80, 0.05), (0.30, 0.10, 0.20, 0.40))
PREFETCHES: dict[str, tuple[Counts, int]] = {
    "none": ((3, 3, 0, 1, 0, 24), 0),
    "top_k": ((5, 1, 0, 1, 0, 24), 2),
    "top_k:overfetch=2.0": ((4, 2, 1, 3, 0, 40), 3),
    "percentile:percentile=60": ((5, 1, 0, 2, 0, 32), 3),
}


@pytest.mark.parametrize(("miss", "counts"), MISSES.items())
def test_misses(miss: str, counts: Counts) -> None:
    p_TE = torch.zeros(4, 5).scatter(1, torch.tensor(NEEDED), torch.tensor([0.4, 0.3, 0.1, 0.08, 0.02]).expand(4, 5))
    trace = _trace([torch.tensor([row[:3] for row in NEEDED])], [p_TE.log()], torch.tensor([0.7, 0.25, 0.05]))
    assert _counts(trace, Policies(eviction="lru", miss=miss), slots=3) == counts


@pytest.mark.parametrize(("routing", "counts"), ROUTINGS.items())
def test_routing(routing: str, counts: Counts) -> None:
    layer = tiny_view()[0]
    logits_TE = torch.tensor([[row.get(expert, 0.0) for expert in range(8)] for row in LOGITS])
    ids_TK, weights_TK = layer.route(logits_TE)
    trace = _trace([ids_TK], [logits_TE], weights_TK, view=MoEView((layer,), "tiny"))
    assert _counts(trace, Policies(eviction="lru", routing=routing), slots=3) == counts


@pytest.mark.parametrize(("prefetch", "expected"), PREFETCHES.items())
def test_prefetches(prefetch: str, expected: tuple[Counts, int]) -> None:
    counts, prefetched = expected
    trace = _two_layers([0, 0, 0, 0], [0, 1, 3, 2], PLANNED)
    assert _counts(trace, Policies(eviction="lru", prefetch=prefetch), slots=4) == counts
    total = simulate(trace, Policies(eviction="lru", prefetch=prefetch), 4, _machine(2), predictor="made").decode.total
    assert total.prefetched == prefetched


@pytest.mark.parametrize(("pre_eviction", "counts"), {"none": (2, 2, 0, 1, 0, 16), "gap": (1, 3, 1, 2, 0, 24)}.items())
def test_pre_eviction(pre_eviction: str, counts: Counts) -> None:
    """Keys 0 and 4 are resident after t0, in three slots; there is no prefetch.

    none: t1 misses 1 (free slot) and 5 (for 0), t2 hits both.
    gap: t1 misses 1, its forecast of 5 gives up 0, 5 takes that slot. t2 hits 1, its forecast of 6 gives up 4, which is
    needed: a collision, in the slot that is free.
    """
    trace = _two_layers([0, 1, 1], [0, 1, 0], ((0.25,) * 4, (0.03, 0.9, 0.04, 0.03), (0.03, 0.03, 0.9, 0.04)))
    assert _counts(trace, Policies(eviction="lru", prefetch="none", pre_eviction=pre_eviction), slots=3) == counts


def test_budget_needs_slots_that_a_forecast_freed() -> None:
    """Pre-eviction frees slots for layer 1 only: layer 0 executes all that its router chose."""
    view = tiny_view()
    logits_TE = torch.tensor([[row.get(expert, 0.0) for expert in range(8)] for row in LOGITS])
    ids_TK, weights_TK = view[0].route(logits_TE)
    forecast = Forecast(
        layer=1, logits_TE=torch.zeros(4, 8), topk_ids_TK=torch.tensor([[6, 7]] * 4), topk_weights_TK=weights_TK
    )
    trace = _trace(
        [ids_TK] * 2, [logits_TE] * 2, weights_TK, view=MoEView(tuple(view)[:2], "tiny"),
        hints={"made": Hints(ahead=1, forecasts={1: forecast})},
    )  # fmt: skip
    policies = Policies(eviction="lru", prefetch="none", pre_eviction="gap:r_max=0", routing="budget", scope="layer")
    layers = simulate(trace, policies, 4, _machine(2), predictor="made").decode.layers
    assert layers[0].skipped == 0
    assert layers[0].requests == 6


@pytest.mark.parametrize("eviction", ["lru", "lhu"])
def test_copies_that_are_no_smaller_are_full_ones(eviction: str) -> None:
    p_TE = torch.zeros(4, 5).scatter(1, torch.tensor(NEEDED), torch.tensor([0.4, 0.3, 0.1, 0.08, 0.02]).expand(4, 5))
    trace = _trace([torch.tensor([row[:3] for row in NEEDED])], [p_TE.log()], torch.tensor([0.7, 0.25, 0.05]))
    int4 = Machine(times=constant_times(1, 2.0), block_bytes=BYTES | {"full": 2, "int8": 2}, bandwidth=16.0)
    found = [
        simulate(trace, Policies(eviction=eviction, miss=miss), 3, int4).decode.total
        for miss in ("fetch", "cascade:levels=full/int4")
    ]
    assert found[0] == found[1]


def test_every_policy_is_here() -> None:
    cases = {MISS: MISSES, ROUTING: ROUTINGS, PREFETCH: PREFETCHES, PRE_EVICTION: ("none", "gap")}
    for registry, named in cases.items():
        assert {text.split(":")[0] for text in named} == set(registry.names())


def _machine(layers: int) -> Machine:
    return Machine(times=constant_times(layers, 2.0), block_bytes=BYTES, bandwidth=16.0)


def _counts(trace: Trace, policies: Policies, slots: int) -> Counts:
    predictor = next(iter(trace.hints), None)
    total = simulate(trace, policies, slots, _machine(trace.shape.layers), predictor=predictor).decode.total
    return total.hits, total.misses, total.collisions, total.evicted, total.skipped, total.bytes_moved


def _two_layers(first: Sequence[int], second: Sequence[int], planned: Sequence[Sequence[float]]) -> Trace:
    ids = [torch.tensor(experts)[:, None] for experts in (first, second)]
    logits = [torch.zeros(len(first), 4).scatter(1, ids_TK, 9.0) for ids_TK in ids]
    planned_TE = torch.tensor(planned).log()
    forecast = Forecast(
        layer=1, logits_TE=planned_TE, topk_ids_TK=planned_TE.topk(1).indices, topk_weights_TK=torch.ones(len(first), 1)
    )
    hints = {"made": Hints(ahead=1, forecasts={1: forecast})}
    return _trace(ids, logits, torch.ones(1), hints=hints)


def _trace(
    ids: list[Tensor], logits: list[Tensor], weights: Tensor, view: MoEView | None = None, **options: Any
) -> Trace:
    shape = ModelShape(layers=len(ids), experts=logits[0].shape[1], top_k=ids[0].shape[1], hidden=1)
    routes = Routes(view=view, logits=logits, ids=ids, weights=[weights.expand(ids_TK.shape) for ids_TK in ids])
    return trace_of(shape, routes, torch.zeros(len(ids[0]), dtype=torch.long), prefill=1, **options)
