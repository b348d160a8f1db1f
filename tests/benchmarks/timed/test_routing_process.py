"""Prescribed routing is recorded, has forecasts of the given accuracy, and replaces only the model's own routers."""

from __future__ import annotations

import pytest
import torch
from benchmarks.timed.routing import RECORDINGS, PrescribedRouting, RoutingTables, recorded, routing_of
from transformers import PreTrainedModel

from expertcast import offload
from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors import ExpertcastError, ModelShape
from expertcast.runtime.benchmarking.bench import decode_greedily, same_logits
from tests.families.models import tiny_model

NEW = 6


def tables(shape: ModelShape, accuracy: float = 1.0) -> RoutingTables:
    """Return random routing of 5 positions of a prompt and `NEW` others; forecasts are all right, or all wrong."""
    draws = torch.rand(5 + NEW, shape.layers, shape.experts, generator=torch.Generator().manual_seed(1))
    order_PLE = draws.argsort(-1)
    first = 0 if accuracy else shape.top_k
    return RoutingTables(
        ids_PLK=order_PLE[..., : shape.top_k], forecast_NLK=order_PLE[5:, :, first : first + shape.top_k], prompt=5
    )


@pytest.mark.parametrize("name", RECORDINGS)
def test_recorded_routing(name: str) -> None:
    made, whole = recorded(name, layers=5, prompt=4, new_tokens=9, accuracy=0.7), routing_of(name)
    first = int(whole.prompt_T.sum())
    assert made.ids_PLK[3:].tolist() == whole.ids_TLK[first - 1 : first + 9, :5].tolist()
    assert made.ids_PLK.min() >= 0
    assert recorded(name, prompt=first, new_tokens=1, accuracy=1.0).ids_PLK.min() >= 0, "the last layer of a prompt"
    with pytest.raises(ExpertcastError, match="use fewer"):
        recorded(name, prompt=1, new_tokens=1000, accuracy=1.0)
    with pytest.raises(ExpertcastError, match="no recorded routing"):
        recorded("olmoe-1b-7b", prompt=1, new_tokens=1, accuracy=1.0)


def test_experts_are_distinct_and_wrong_forecasts_wrong() -> None:
    made = recorded("qwen3-30b-a3b", prompt=1, new_tokens=60, accuracy=0.5)
    truth_NLK = made.ids_PLK[1:]
    assert all(len(set(row)) == 6 for row in made.forecast_NLK.flatten(0, 1).tolist())
    changed = made.forecast_NLK != truth_NLK
    among = (made.forecast_NLK.unsqueeze(-1) == truth_NLK.unsqueeze(-2)).any(-1)
    assert changed.float().mean() == pytest.approx(0.5, abs=0.02)
    assert not (among & changed).any()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "glm4_moe_lite", "mixtral"])
def test_model_computes_with_the_tables(family: str) -> None:
    model = tiny_model(family)
    view = find_moe_layers(model)
    made = tables(view.shape)
    seen: dict[int, list[torch.Tensor]] = {layer.index: [] for layer in view}
    prompt_ids = torch.arange(5).unsqueeze(0)
    before = decode_greedily(model, prompt_ids, NEW)
    with PrescribedRouting(model, view, made):
        for layer in view:  # the experts' inputs, after all hooks
            layer.experts.register_forward_pre_hook(
                lambda _module, args, index=layer.index: seen[index].append(args[1].clone())
            )
        decode_greedily(model, prompt_ids, NEW)
    for layer, parts in seen.items():
        assert torch.cat(parts).sort().values.equal(made.ids_PLK[: 5 + NEW - 1, layer].sort().values)
    assert same_logits(decode_greedily(model, prompt_ids, NEW), before)


@pytest.fixture
def tiny() -> PreTrainedModel:
    return tiny_model("qwen3_moe")


@pytest.mark.parametrize("mode", ["exact", "speculate"])
@pytest.mark.parametrize(("accuracy", "hits"), [(1.0, 1.0), (0.0, 0.0)])
def test_offloaded_runs_see_the_same_routing(tiny: PreTrainedModel, mode: str, accuracy: float, hits: float) -> None:
    view = find_moe_layers(tiny)
    prompt_ids = torch.arange(5).unsqueeze(0)
    with PrescribedRouting(tiny, view, tables(view.shape, accuracy)) as routing:
        expected = decode_greedily(tiny, prompt_ids, NEW)
        with offload(tiny, predictor=routing, mode=mode, slots=6, cache=False, forecasts="always") as offloaded:
            got = decode_greedily(tiny, prompt_ids, NEW, offloaded=offloaded)
            stats = offloaded.stats.layers[1:]  # layer 0 has no forecast
    assert same_logits(got, expected) == (mode == "exact" or accuracy == 1.0)
    # a wrong forecast that is executed was prefetched in time too
    assert sum(layer.requests for layer in stats) == 3 * 2 * (NEW - 1)
    assert sum(layer.hits for layer in stats) == 3 * 2 * (NEW - 1) * (1.0 if mode == "speculate" else hits)


def test_other_predictors_are_not_told_the_truth(tiny: PreTrainedModel) -> None:
    view = find_moe_layers(tiny)
    with (
        PrescribedRouting(tiny, view, tables(view.shape)),
        offload(tiny, predictor="next_norm", mode="exact", slots=4, cache=False, forecasts="always") as offloaded,
    ):
        decode_greedily(tiny, torch.arange(5).unsqueeze(0), NEW, offloaded=offloaded)
        assert offloaded.stats.hit_rate < 0.6
