"""Advice for a GPU that is not there follows the numbers of its model, and needs nothing but a configuration."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from expertcast.checkpoints.checkpoint import save_predictor
from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors import ExpertcastError
from expertcast.predictors.base import PredictorConfig
from expertcast.predictors.baselines import NextNorm
from expertcast.runtime import OffloadConfig
from expertcast.runtime.advising import absent
from expertcast.runtime.advising.absent import CAVEAT, AbsentAdvice, AbsentModel, advise_absent, known_recall
from expertcast.runtime.advising.advise import WORTH
from expertcast.runtime.benchmarking.routing import RoutingOptions
from expertcast.runtime.benchmarking.shapes import SHAPES
from expertcast.runtime.timed.costs import LINKS

LAYERS = 3
QWEN3 = SHAPES["qwen3-30b-a3b"]


@pytest.fixture(scope="module")
def model() -> AbsentModel:
    return AbsentModel.of("qwen3-30b-a3b", LAYERS)


def advised(
    model: AbsentModel, capacity: float, *, link: str = "pcie4", accuracy: float = 1.0, host: str = "fast"
) -> AbsentAdvice:
    """Advice for a capacity, a link, forecasts of an accuracy and a host."""
    return advise_absent(
        model,
        model.sized(OffloadConfig(), capacity),
        bandwidth=LINKS[link],
        routing=RoutingOptions(accuracy=accuracy),
        host=host,
    )


def test_perfect_forecasts_over_a_slow_link_without_a_cache_are_worth_it(model: AbsentModel) -> None:
    advice = advised(model, 0.0)
    on_demand, prefetched = advice.ways[:2]
    assert advice.chosen.prefetch
    assert advice.chosen.limit == "link"
    assert advice.chosen.tpot_s < on_demand.tpot_s
    assert prefetched.tpot_s < on_demand.tpot_s
    assert on_demand.misses == model.view.shape.top_k * LAYERS
    assert on_demand.bound_s == pytest.approx(on_demand.misses * model.block_bytes / LINKS["pcie4"])
    assert all(way.tpot_s > way.bound_s for way in advice.ways)
    assert advice.levers["a cache of a quarter of the experts"] < advice.chosen.tpot_s
    assert advice.levers["a link of twice the speed"] < advice.chosen.tpot_s


def test_wrong_forecasts_are_not(model: AbsentModel) -> None:
    advice = advised(model, 0.0, accuracy=0.0)
    assert not advice.chosen.prefetch
    assert advice.chosen.tpot_s <= advice.ways[1].tpot_s
    assert advice.config().predictor is None


def test_where_all_experts_fit_there_is_nothing_to_prefetch(model: AbsentModel) -> None:
    advice = advised(model, 1.0)
    assert not advice.chosen.prefetch
    assert advice.slots == advice.experts == LAYERS * 128
    assert advice.ways[0].misses < 0.05 * model.view.shape.top_k * LAYERS  # what came before has filled the cache
    assert advice.levers == {}
    assert "nothing to prefetch" in advice.text()


def test_experts_that_are_yet_to_be_copied_once_are_no_reason(
    model: AbsentModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absent, "_sized", lambda case, capacity: replace(case, capacity=capacity, warm_up=2, steps=3))
    advice = advised(model, 1.0, link="pcie3")
    assert advice.ways[3].tpot_s < (1 - WORTH) * advice.ways[2].tpot_s
    assert not advice.chosen.prefetch


def test_a_host_that_limits_asks_for_a_graph(model: AbsentModel) -> None:
    slow, fast = (advised(model, 0.5, link="grace", accuracy=0.9, host=host) for host in ("a100", "fast"))
    assert slow.ways[0].limit == "host"
    assert slow.chosen.link == "kernel"
    assert slow.config().link == "kernel"
    assert "GraphDecoder" in slow.text()
    assert slow.ways[0].tpot_s > 2 * fast.ways[0].tpot_s
    assert slow.ways[2:] == fast.ways[2:]  # a graph has no host


def test_over_a_link_that_limits_a_graph_is_not_worth_it() -> None:
    eager = advised(AbsentModel.of("mixtral-8x7b", LAYERS), 0.0, link="pcie3", accuracy=0.9)
    assert eager.chosen.link == eager.config().link == "cuda"
    assert "GraphDecoder" not in eager.text()
    assert set(eager.levers) == {
        "a cache of a quarter of the experts", "a link of twice the speed", "attention as CUDA graphs (torch.compile)"
    }  # fmt: skip
    assert eager.levers["attention as CUDA graphs (torch.compile)"] <= eager.chosen.tpot_s


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b"])
def test_a_folder_without_weights_is_enough(name: str, tmp_path: Path) -> None:
    config = SHAPES[name].config()
    config.save_pretrained(tmp_path)
    (file,) = tmp_path.iterdir()
    last = config.vocab_size - 1  # beyond the vocabulary of the model that decodes
    published = {"pad_token_id": last, "eos_token_id": last, "quantization_config": {"quant_method": "mxfp4"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | published))
    there, shape = AbsentModel.of(str(tmp_path), 2), AbsentModel.of(name, 2)
    assert there.block_bytes == shape.block_bytes
    assert advised(there, 0.25, accuracy=0.9).ways == advised(shape, 0.25, accuracy=0.9).ways


def test_what_is_advised_is_a_configuration(model: AbsentModel, tmp_path: Path) -> None:
    advice = advise_absent(
        model, OffloadConfig(slots=64), bandwidth=12e9, routing=RoutingOptions(accuracy=1.0), predictor="checkpoint"
    )
    assert advice.chosen.prefetch
    advice.config().save(tmp_path / "offload.json")
    assert OffloadConfig.load(tmp_path / "offload.json") == OffloadConfig(
        predictor="checkpoint", slots=64, link=advice.chosen.link
    )
    assert advised(model, 0.0).config().cache is False


def test_it_says_that_these_are_figures_of_a_model(model: AbsentModel) -> None:
    advice = advised(model, 0.0)
    assert advice.text().splitlines()[-1] == CAVEAT
    assert json.loads(json.dumps(advice.as_dict()))["caveat"] == CAVEAT
    assert "no predictor" not in advice.text()
    assert "train one" in advice.text()  # nothing was named that is so often right


def test_recall_is_the_checkpoint_s_on_validation(reference_model: PreTrainedModel, tmp_path: Path) -> None:
    view = find_moe_layers(reference_model)
    predictor, targets = NextNorm(PredictorConfig(), view.shape), view.shape.layers - 1

    def saved(**metrics: object) -> str:
        save_predictor(predictor, tmp_path / "made", view=view, metrics=metrics)
        return str(tmp_path / "made")

    def scored(recall: float) -> dict[str, object]:
        per_layer = [recall - 0.1, recall + 0.1] * (targets // 2) + [recall]
        return {"recall_at_k": {"next_norm": {"mean": 0.0, "per_layer": per_layer}}}

    model = AbsentModel.of("reference")
    assert known_recall(saved(**scored(0.5), validation=scored(0.8)), model) == pytest.approx(0.8)
    for metrics in ({}, {**scored(0.8), "ahead": 2}):
        with pytest.raises(ExpertcastError, match="give --accuracy instead"):
            known_recall(saved(**metrics), model)
    with pytest.raises(ExpertcastError, match=r"was trained for a model of .*'E': 64.* has .*'E': 128"):
        known_recall(saved(**scored(0.8)), AbsentModel.of("qwen3-30b-a3b", 1))


def test_refusals(model: AbsentModel, tmp_path: Path) -> None:
    with pytest.raises(ExpertcastError, match=r"glm4_moe_lite, whose .* qwen3_moe, gpt_oss, olmoe, mixtral are known"):
        AbsentModel.of("glm-4.7-flash")
    with pytest.raises(ExpertcastError, match="--layers 49: qwen3-30b-a3b has 1 to 48"):
        AbsentModel.of("qwen3-30b-a3b", 49)
    with pytest.raises(ExpertcastError, match="cannot load model"):
        AbsentModel.of(str(tmp_path))
    config = QWEN3.config(4)
    config.mlp_only_layers = [2]
    config.save_pretrained(tmp_path)
    with pytest.raises(ExpertcastError, match="layers without experts"):
        AbsentModel.of(str(tmp_path))
    with pytest.raises(ExpertcastError, match=r"--capacity 1\.5"):
        model.sized(OffloadConfig(), 1.5)
    with pytest.raises(ExpertcastError, match="slots=4 is fewer than the 8"):
        model.sized(OffloadConfig(), 0.01)
