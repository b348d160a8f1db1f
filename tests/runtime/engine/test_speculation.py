"""Speculative execution against a forward written by hand, and the routing weights of each family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from expertcast import offload
from expertcast.checkpoints.checkpoint import save_predictor
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.traces import TraceDataset
from expertcast.predictors import (
    Forecast,
    MoEView,
    Predictor,
    PredictorConfig,
    RouterState,
    predictor_class,
)
from expertcast.predictors.baselines import QuasiHidden, RouterInput
from expertcast.predictors.early_attention import EarlyAttention, EarlyConfig
from expertcast.predictors.view import weights_over
from expertcast.runtime.engine.front import speculate
from tests.families.models import CONFIGS, tiny_model
from tests.runtime.conftest import assert_same, greedy


@pytest.fixture(scope="module")
def quasi(reference_view: MoEView, reference_traces: TraceDataset) -> Predictor:
    predictor = QuasiHidden(PredictorConfig(ahead=(1, 2)), reference_view.shape)
    predictor.set_defaults(reference_traces.defaults)
    return predictor.bind(reference_view)


@torch.no_grad()
def _by_hand(model: PreTrainedModel, default_LED: Tensor, ids: Tensor, *, layers: set[int]) -> Tensor:
    """Logits of a Qwen3-MoE whose chained quasi-hidden forecasts are executed: rows B5, B8 and B9, line by line."""
    base = model.model
    hidden = base.embed_tokens(ids)
    rotary = base.rotary_emb(hidden, torch.arange(ids.shape[1])[None])
    forecast: tuple[Tensor, Tensor] | None = None
    for index, block in enumerate(base.layers):
        attention, _ = block.self_attn(block.input_layernorm(hidden), position_embeddings=rotary, attention_mask=None)
        residual = hidden + attention
        router_input_TD = block.post_attention_layernorm(residual).flatten(0, 1)
        _, weights_TK, ids_TK = block.mlp.gate(router_input_TD)
        if forecast is not None and index in layers:
            ids_TK, weights_TK = forecast
        if index + 1 < len(base.layers):
            following = base.layers[index + 1]
            default_TD = torch.einsum("tk,tkd->td", weights_TK.float(), default_LED[index][ids_TK])
            quasi_TD = (residual.flatten(0, 1).float() + default_TD).to(residual.dtype)
            _, next_weights, next_ids = following.mlp.gate(following.post_attention_layernorm(quasi_TD))
            forecast = (next_ids, next_weights)
        output_TD = block.mlp.experts(router_input_TD, ids_TK, weights_TK)
        hidden = residual + output_TD.view_as(residual)
    logits: Tensor = model.lm_head(base.norm(hidden))
    return logits


@pytest.mark.parametrize("layers", [None, [1, 2, 7, 8, 9], []])
def test_against_a_forward_by_hand(
    layers: list[int] | None,
    reference_model: PreTrainedModel,
    reference_view: MoEView,
    quasi: QuasiHidden,
    one: dict[str, Tensor],
) -> None:
    executed = set(range(12)) if layers is None else set(layers)
    expected = _by_hand(reference_model, quasi.expert_LED, one["input_ids"], layers=executed)
    with speculate(reference_model, reference_view, quasi, layers=layers), torch.no_grad():
        got = reference_model(**one, use_cache=False).logits
    assert torch.equal(got, expected)
    exact = reference_model(**one, use_cache=False).logits
    assert torch.equal(got, exact) == (layers == [])


def test_offloaded_equals_resident_with_hooks(
    reference_model: PreTrainedModel, reference_view: MoEView, quasi: Predictor, four: dict[str, Tensor]
) -> None:
    exact = greedy(reference_model, four, 4)
    for layers in (None, [3, 4, 11]):
        with speculate(reference_model, reference_view, quasi, layers=layers, prefill=False):
            expected = greedy(reference_model, four, 4)
        assert torch.equal(expected[1][0], exact[1][0]), "prefill is exact"
        assert not torch.equal(expected[1][1], exact[1][1])
        mode = "speculate" if layers is None else "hybrid"
        with offload(reference_model, predictor=quasi, mode=mode, layers=layers, slots=64) as offloaded:
            assert_same(greedy(offloaded, four, 4), expected)


def test_speculation_fetches_only_what_is_forecast(
    reference_model: PreTrainedModel, quasi: Predictor, one: dict[str, Tensor]
) -> None:
    """Without a cache: layer 0 loads on demand, every other layer exactly the K experts of its forecast."""
    with offload(reference_model, predictor=quasi, mode="speculate", slots=8, cache=False) as offloaded:
        past = offloaded(**one, use_cache=True).past_key_values
        offloaded.reset_stats()
        offloaded(input_ids=torch.tensor([[17]]), past_key_values=past)
        first, *others = offloaded.stats.layers
        assert (first.requests, first.misses) == (4, 4)
        assert first.prefetched == 0, "no layer runs early enough to forecast it"
        for layer in others:
            assert (layer.requests, layer.hits, layer.prefetched, layer.prefetched_used) == (4, 4, 4, 4)
            assert layer.misses == layer.dropped == 0
            assert layer.bytes_moved == 4 * offloaded.pool.layout.block_bytes


def test_speculated_prefill(
    reference_model: PreTrainedModel, reference_view: MoEView, quasi: Predictor, one: dict[str, Tensor]
) -> None:
    with speculate(reference_model, reference_view, quasi):
        expected = greedy(reference_model, one, 4)
    with offload(reference_model, predictor=quasi, mode="speculate", slots=64, speculate_prefill=True) as offloaded:
        assert_same(greedy(offloaded, one, 4), expected)


def test_hybrid_layers_from_a_checkpoint(reference_model: PreTrainedModel, quasi: Predictor, tmp_path: Path) -> None:
    recall = [0.5, 0.95, 0.89, *[0.91] * 8]
    view = find_moe_layers(reference_model)
    save_predictor(
        quasi, tmp_path / "q", view=view, metrics={"recall_at_k": {"quasi_hidden": {"mean": 0.9, "per_layer": recall}}}
    )
    for least, layers in ((0.9, [2, 4, 5, 6, 7, 8, 9, 10, 11]), (0.95, [2])):
        with offload(reference_model, predictor=tmp_path / "q", mode="hybrid", min_recall=least) as offloaded:
            assert sorted(offloaded.executed_layers) == layers


def test_hybrid_layers_at_a_longer_distance(
    reference_model: PreTrainedModel, reference_view: MoEView, tmp_path: Path
) -> None:
    """A forecast two layers ahead is executed where it was right at that distance, on validation."""
    predictor = RouterInput(PredictorConfig(ahead=(1, 2)), reference_view.shape)
    near, far = (
        {"router_input": {"mean": 0.9, "per_layer": [value] * count}} for value, count in ((1.0, 11), (0.5, 10))
    )
    far["router_input"]["per_layer"][3] = 0.95
    scores = {"recall_at_k": near, "ahead": 1, "targets": [*range(1, 12)]}
    further = {"2": {"recall_at_k": far, "ahead": 2, "targets": [*range(2, 12)]}}
    metrics = {**scores, "validation": {**scores, "further": further}}
    save_predictor(predictor, tmp_path / "p", view=reference_view, metrics=metrics)
    for ahead, layers in ((1, [*range(1, 12)]), (2, [5])):
        with offload(reference_model, predictor=tmp_path / "p", mode="hybrid", ahead=ahead) as offloaded:
            assert sorted(offloaded.executed_layers) == layers


class _Recorder(RouterInput):
    """Keeps what it is told of the previous token."""

    name = "recorder"
    uses_previous_token = True
    traceable = False

    def __init__(self, view: MoEView) -> None:
        super().__init__(PredictorConfig(), view.shape)
        self.bind(view)
        self.now: dict[int, list[Tensor]] = {}
        self.previous: list[tuple[int, Tensor | None]] = []

    def _forecast(self, state: RouterState, target: int, ahead: int) -> Forecast:
        self.now.setdefault(state.layer, []).append(state.logits_TE.clone())
        self.previous.append((state.layer, state.previous_logits_TLE))
        return super()._forecast(state, target, ahead)


@pytest.mark.parametrize("mode", ["exact", "speculate"])
def test_previous_logits(
    mode: str, reference_model: PreTrainedModel, reference_view: MoEView, four: dict[str, Tensor]
) -> None:
    """Each decode step is given the router logits of the step before, row by row, or those of the forecast that was
    executed in their place; a new text starts anew."""
    recorder = _Recorder(reference_view)
    with offload(reference_model, predictor=recorder, slots=64, mode=mode, forecasts="always") as offloaded:
        greedy(offloaded, four, 5)
        assert len(recorder.now[0]) == 4, "no forecast in the prefill"
        for layer, previous in recorder.previous[11:]:
            assert previous is not None
            assert previous.shape == (4, 12, 64)
            step = sum(1 for seen, _ in recorder.previous[11:] if seen == layer)
            assert step == 3
        for step in range(1, 4):
            _, previous = recorder.previous[11 * step]
            assert previous is not None
            assert torch.equal(previous[:, 3], recorder.now[3][step - 1])
            assert not previous.isnan().any()
        _, after_prefill = recorder.previous[0]
        assert after_prefill is not None, "the prompt's last token"
        recorder.previous.clear()
        offloaded(input_ids=torch.tensor([[9]] * 4), use_cache=False)
        assert recorder.previous[0][1] is None, "another text"


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_weights_over(family: str) -> None:
    """Over the router's own ids: the router's own weights. Over others: the family's rule, written out."""
    model = tiny_model(family, torch.float32)
    layer = find_moe_layers(model)[0]
    torch.manual_seed(0)
    hidden_TD = torch.randn(5, layer.hidden_size)
    with torch.no_grad():
        logits_TE, weights_TK, ids_TK = layer.router(hidden_TD)
        own_TK = weights_over(layer, logits_TE, ids_TK)
        assert torch.equal(own_TK, weights_TK)
        assert torch.equal(weights_over(layer, logits_TE, ids_TK.flip(-1)).sort().values, weights_TK.sort().values)
    other_TK = logits_TE.topk(4, largest=False).indices[:, [0, 3]]
    if family == "deepseek_v2":  # two groups of four, of which one is chosen: two experts of the other one
        other_TK = (1 - ids_TK[:, :1] // 4) * 4 + torch.tensor([0, 3])
    got_TK = weights_over(layer, logits_TE, other_TK)
    assert got_TK.shape == weights_TK.shape
    scores_TK = logits_TE.softmax(-1).gather(-1, other_TK)
    expected = {
        "qwen3_moe": scores_TK / scores_TK.sum(-1, keepdim=True),
        "qwen2_moe": scores_TK,
        "olmoe": scores_TK,
        "mixtral": scores_TK / scores_TK.sum(-1, keepdim=True),
        "gpt_oss": logits_TE.gather(-1, other_TK).softmax(-1),
        "deepseek_v2": scores_TK,
        "glm4_moe_lite": functional.normalize(logits_TE.sigmoid().gather(-1, other_TK), p=1, dim=-1) * 1.8,
    }
    if family in expected:
        torch.testing.assert_close(got_TK, expected[family])
    else:
        assert torch.isfinite(got_TK).all()


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_families(family: str) -> None:
    """Every family speculates offloaded as the resident model with hooks does."""
    model = tiny_model(family)
    view = find_moe_layers(model)
    cls = predictor_class("next_norm")
    predictor = cls(cls.config_class(), view.shape).bind(view)
    inputs = {"input_ids": torch.tensor([[3, 4, 5]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    with speculate(model, view, predictor, prefill=False):
        expected = greedy(model, inputs, 4)
    with offload(model, slots=5, predictor="next_norm", mode="speculate") as offloaded:
        assert_same(greedy(offloaded, inputs, 4), expected)


# Early attention in an offloaded run: forecasts beside the experts


@pytest.fixture(scope="module")
def early(reference_view: MoEView) -> Predictor:
    return EarlyAttention(EarlyConfig(ahead=(1, 2, 3)), reference_view.shape).bind(reference_view)
