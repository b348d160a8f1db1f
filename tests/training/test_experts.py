"""Recall of each expert against counting token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from expertcast.data.batch import TraceBatch
from expertcast.predictors.base import PredictorConfig
from expertcast.predictors.view import MoEView
from expertcast.training.evaluation import evaluate
from expertcast.training.metrics import ExpertRecall, compare, rank_routing
from expertcast.training.scoring import states_of
from tests.training.synthetic import Oracle, Same, random_batch, tiny_view


@pytest.fixture(scope="module")
def view() -> MoEView:
    return tiny_view()


@pytest.fixture(scope="module")
def batch(view: MoEView) -> TraceBatch:
    return random_batch(view, 40)


@pytest.fixture(scope="module")
def values(view: MoEView, batch: TraceBatch) -> dict[str, Any]:
    predictors = {
        "same": Same(PredictorConfig(), view.shape).bind(view),
        "oracle": Oracle(batch, view.shape).bind(view),
    }
    return evaluate(predictors, [batch], view).as_dict()


def test_counts_are_those_of_a_loop_over_tokens(values: dict[str, Any], view: MoEView, batch: TraceBatch) -> None:
    used = [[0] * view.shape.experts for _ in values["targets"]]
    found = [[0] * view.shape.experts for _ in values["targets"]]
    for index, layer in enumerate(values["targets"]):
        for token in range(len(batch)):
            forecast_1E = batch.logits_TLE[token, layer - 1].roll(1)[None]  # what `same` says
            named = set(view[layer].route(forecast_1E)[0].flatten().tolist())
            for expert in view[layer].route(batch.logits_TLE[token, layer][None])[0].flatten().tolist():
                used[index][expert] += 1
                found[index][expert] += expert in named
    assert values["per_expert"]["used"] == used
    assert values["per_expert"]["found"]["same"] == found
    assert values["per_expert"]["found"]["oracle"] == used


def test_a_layers_experts_together_are_its_recall(values: dict[str, Any]) -> None:
    for name, found in values["per_expert"]["found"].items():
        shares = [sum(hits) / sum(used) for hits, used in zip(found, values["per_expert"]["used"], strict=True)]
        assert shares == pytest.approx(values["recall_at_k"][name]["per_layer"])


def test_halves_of_the_data_add_up(view: MoEView, batch: TraceBatch) -> None:
    predictor = Same(PredictorConfig(), view.shape).bind(view)
    whole, *halves = (ExpertRecall(1, view.shape.experts) for _ in range(3))
    for metrics, rows in ((halves[:1], batch[:11]), (halves[1:], batch[11:]), ([whole], batch)):
        states = states_of(view, rows)
        for metric in metrics:
            metric.update(0, compare(predictor.forecast(states[0], 1), rank_routing(states[1])))
    for key, value_LE in whole.compute().items():
        assert torch.equal(value_LE, sum(half.compute()[key] for half in halves))
