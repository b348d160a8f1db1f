"""Prescribed routing has the requested properties, is equal in every run, and replaces only the model's own routers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.timed.routing import RoutingOptions, RoutingProcess, RoutingTables, drawn
from transformers import PreTrainedModel

from expertcast import offload
from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors import ExpertcastError, ModelShape
from expertcast.runtime.benchmarking.bench import decode_greedily, same_logits
from tests.families.models import tiny_model

SHAPE = ModelShape(layers=6, experts=32, top_k=4, hidden=8)
NEW = 6


def tables(shape: ModelShape = SHAPE, prompt: int = 20, new_tokens: int = 200, **options: Any) -> RoutingTables:
    return drawn(shape, prompt=prompt, new_tokens=new_tokens, options=RoutingOptions(**options))


@pytest.mark.parametrize(
    ("options", "reuse", "accuracy"),
    [
        ({"persistence": 1.0, "accuracy": 1.0}, 1.0, 1.0),
        ({"persistence": 0.0, "skew": 0.0, "accuracy": 0.0}, 0.0, 0.0),
        ({"persistence": 0.5, "skew": 0.0, "accuracy": 0.8}, 0.5, 0.8),
        ({"persistence": 0.3, "skew": 0.8, "accuracy": 0.9}, 0.3, 0.9),
    ],
)
def test_properties(options: dict[str, float], reuse: float, accuracy: float) -> None:
    measured = tables(**options).measured()
    assert measured["reuse"] == pytest.approx(reuse, abs=0.02)
    assert measured["accuracy"] == pytest.approx(accuracy, abs=0.02)


def test_experts_are_distinct_where_few_are_left() -> None:
    made = tables(ModelShape(layers=2, experts=5, top_k=4, hidden=8), persistence=0.0, accuracy=0.0)
    for ids in (made.ids_PLK, made.forecast_NLK):
        assert all(len(set(row)) == 4 for row in ids.flatten(0, 1).tolist())


def test_experts_are_distinct_and_wrong_forecasts_wrong() -> None:
    made = tables(accuracy=0.5)
    truth_NLK = made.ids_PLK[made.prompt :]
    for ids in (made.ids_PLK, made.forecast_NLK):
        sorted_ids = ids.sort(dim=-1).values
        assert (sorted_ids[..., 1:] > sorted_ids[..., :-1]).all()
        assert ids.min() >= 0
        assert ids.max() < SHAPE.experts
    changed = made.forecast_NLK != truth_NLK
    among = (made.forecast_NLK.unsqueeze(-1) == truth_NLK.unsqueeze(-2)).any(-1)
    assert changed.any()
    assert not (among & changed).any()


def test_skew_concentrates() -> None:
    assert tables(skew=2.0).measured()["distinct_experts"] < tables(skew=0.0).measured()["distinct_experts"]


def test_seed_decides() -> None:
    assert tables(seed=3).ids_PLK.equal(tables(seed=3).ids_PLK)
    assert not tables(seed=3).ids_PLK.equal(tables(seed=4).ids_PLK)


def test_options_out_of_range() -> None:
    for options in ({"persistence": 1.1}, {"accuracy": -0.1}, {"skew": -1.0}):
        (name, value) = next(iter(options.items()))
        with pytest.raises(ExpertcastError, match=f"{name}={value}"):
            RoutingOptions(**options)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "glm4_moe_lite", "mixtral"])
def test_model_computes_with_the_tables(family: str) -> None:
    model = tiny_model(family)
    view = find_moe_layers(model)
    made = tables(view.shape, prompt=5, new_tokens=NEW, seed=1)
    seen: dict[int, list[torch.Tensor]] = {layer.index: [] for layer in view}
    prompt_ids = torch.arange(5).unsqueeze(0)
    before = decode_greedily(model, prompt_ids, NEW)
    with RoutingProcess(model, view, made):
        for layer in view:  # the experts' inputs, after all hooks
            layer.experts.register_forward_pre_hook(
                lambda _module, args, index=layer.index: seen[index].append(args[1].clone())
            )
        decode_greedily(model, prompt_ids, NEW)
    for layer, parts in seen.items():
        assert torch.cat(parts).equal(made.ids_PLK[: 5 + NEW - 1, layer])
    assert same_logits(decode_greedily(model, prompt_ids, NEW), before)


@pytest.fixture
def tiny() -> PreTrainedModel:
    return tiny_model("qwen3_moe")


@pytest.mark.parametrize("mode", ["exact", "speculate"])
@pytest.mark.parametrize(("accuracy", "hits"), [(1.0, 1.0), (0.0, 0.0)])
def test_offloaded_runs_see_the_same_routing(tiny: PreTrainedModel, mode: str, accuracy: float, hits: float) -> None:
    view = find_moe_layers(tiny)
    prompt_ids = torch.arange(5).unsqueeze(0)
    made = tables(view.shape, prompt=5, new_tokens=NEW, accuracy=accuracy)
    with RoutingProcess(tiny, view, made) as process:
        expected = decode_greedily(tiny, prompt_ids, NEW)
        with offload(
            tiny, predictor=process.predictor(), mode=mode, slots=6, cache=False, forecasts="always"
        ) as offloaded:
            got = decode_greedily(tiny, prompt_ids, NEW, offloaded=offloaded)
            stats = offloaded.stats.layers[1:]  # layer 0 has no forecast
    assert same_logits(got, expected) == (mode == "exact" or accuracy == 1.0)
    # a wrong forecast that is executed was prefetched in time too
    assert sum(layer.requests for layer in stats) == 3 * 2 * (NEW - 1)
    assert sum(layer.hits for layer in stats) == 3 * 2 * (NEW - 1) * (1.0 if mode == "speculate" else hits)


def test_other_predictors_are_not_told_the_truth(tiny: PreTrainedModel) -> None:
    view = find_moe_layers(tiny)
    made = tables(view.shape, prompt=5, new_tokens=NEW)
    with (
        RoutingProcess(tiny, view, made),
        offload(tiny, predictor="next_norm", mode="exact", slots=4, cache=False, forecasts="always") as offloaded,
    ):
        decode_greedily(tiny, torch.arange(5).unsqueeze(0), NEW, offloaded=offloaded)
        assert offloaded.stats.hit_rate < 0.6


def test_overfetch_asks_for_the_forecast_first(tiny: PreTrainedModel) -> None:
    view = find_moe_layers(tiny)
    made = tables(view.shape, prompt=5, new_tokens=NEW)
    process = RoutingProcess(tiny, view, made)
    predictor = process.predictor()
    process.position = 5
    forecast = predictor._forecasts[0][2]
    assert set(forecast.logits_TE.topk(2).indices[0].tolist()) == set(made.forecast_NLK[0, 2].tolist())


def test_a_longer_run_than_the_tables_is_one_line(tiny: PreTrainedModel) -> None:
    view = find_moe_layers(tiny)
    made = tables(view.shape, prompt=5, new_tokens=2)
    with RoutingProcess(tiny, view, made), pytest.raises(ExpertcastError, match="more than 7"):
        decode_greedily(tiny, torch.arange(5).unsqueeze(0), 4)
