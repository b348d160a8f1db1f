"""Timely recall's closed form against the link that the simulator counts on."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from expertcast.predictors.base import Forecast
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import ModelShape
from expertcast.runtime.policies import Policies
from expertcast.runtime.simulation.machine import Case, Machine, constant_times
from expertcast.runtime.simulation.simulator import simulate
from expertcast.training.metrics import (
    RoutingMeans,
    compare,
    copies_in_time,
    rank_routing,
    ratio_windows,
    routing_scores,
    timely_recall,
)
from tests.runtime.simulation import made

TOKENS, LAYERS, EXPERTS, TOP_K = 40, 5, 12, 4
SHAPE = ModelShape(layers=LAYERS, experts=EXPERTS, top_k=TOP_K, hidden=4)
Ids = list[list[int]]


def routing(seed: int) -> tuple[list[Ids], dict[int, Ids]]:
    """What each token needs at each layer, [T][L][K], and forecasts that are right three times out of four."""
    choose = random.Random(seed)
    needed = [[choose.sample(range(EXPERTS), TOP_K) for _ in range(LAYERS)] for _ in range(TOKENS)]
    hints: dict[int, Ids] = {layer: [] for layer in range(1, LAYERS)}
    for token in needed:
        for layer in range(1, LAYERS):
            others = [expert for expert in range(EXPERTS) if expert not in token[layer]]
            hint = [e if choose.random() < 0.75 else others.pop() for e in choose.sample(token[layer], TOP_K)]
            hints[layer].append(hint)
    return needed, hints


def closed_form(needed: list[Ids], hints: dict[int, Ids], copies: float, first: int) -> float:
    """Experts that arrive in time, over all layers with a forecast, from token `first` on."""
    total = 0.0
    for layer, rows in hints.items():
        means = RoutingMeans(SHAPE, 1, {"link": copies})
        forecast = _routing(layer, rows[first:])
        means.update(0, compare(forecast, rank_routing(_routing(layer, [token[layer] for token in needed[first:]]))))
        total += float(means.per_layer()["timely@link"][0]) * len(rows[first:]) * TOP_K
    return total


def _routing(layer: int, ids: Sequence[Sequence[int]]) -> Forecast:
    """Experts by falling weight."""
    weights_TK = torch.arange(TOP_K, 0, -1).float().expand(len(ids), -1)
    logits_TE = torch.zeros(len(ids), EXPERTS).scatter(1, torch.tensor(ids), weights_TK)
    return Forecast(layer=layer, logits_TE=logits_TE, topk_ids_TK=torch.tensor(ids), topk_weights_TK=weights_TK)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.3, 2.0, 3.0, 5.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_it_counts_what_the_simulator_counts(ratio: float, seed: int) -> None:
    """A decode without a cache, all forecast experts asked for in their order: `prefetched_in_time` of the link."""
    needed, hints = routing(seed)
    trace = made.trace(needed, experts=EXPERTS, hints=hints)
    layer_s, copy_s = 1.0, ratio / TOP_K
    machine = Machine(times=constant_times(LAYERS, layer_s), block_bytes={"full": 1}, bandwidth=1 / copy_s)
    case = Case(
        policies=Policies(), slots=LAYERS * EXPERTS, machine=machine, predictor="made", cache=False, carry=False
    )
    counted = simulate(trace, case).decode.total
    assert counted.requests == LAYERS * (TOKENS - 1) * TOP_K
    expected = closed_form(needed, hints, copies_in_time(layer_s, copy_s), first=1)
    assert counted.prefetched_in_time == round(expected)
    assert counted.prefetched_used >= counted.prefetched_in_time


def test_by_hand() -> None:
    """Forecast 3 1 0 2, needed 1 2 5 6, 2.5 copies fit: expert 1 has come second, in whole; 2 would come fourth."""
    comparison = compare(_routing(1, [[3, 1, 0, 2]]), rank_routing(_routing(1, [[1, 2, 5, 6]])))
    for copies, whole, share in ((2.5, 0.25, 0.25), (1.5, 0.0, 0.125), (3.25, 0.25, 0.3125), (9.0, 0.5, 0.5)):
        assert timely_recall(copies)(comparison).tolist() == [whole]
        assert timely_recall(copies, whole=False)(comparison).tolist() == pytest.approx([share])


def test_windows() -> None:
    """K = 4 copies take R layer times; a forecast that takes a fifth of the layer leaves four fifths."""
    assert ratio_windows(4) == pytest.approx({"R1": 4.0, "R2": 2.0, "R5": 0.8})
    assert ratio_windows(4, forecast_share=0.2) == pytest.approx({"R1": 3.2, "R2": 1.6, "R5": 0.64})
    assert copies_in_time(2e-3, 1e-3, 5e-4) == pytest.approx(1.5)
    assert copies_in_time(1e-3, 1e-3, 2e-3) == 0.0
    assert list(routing_scores(SHAPE, {"link": 2.0}))[-2:] == ["timely@link", "timely_bytes@link"]
    with pytest.raises(ExpertcastError, match="give seconds above 0"):
        copies_in_time(1.0, 0.0)
