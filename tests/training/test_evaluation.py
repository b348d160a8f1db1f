"""Evaluation: teacher-forced and chained scores against loops over single tokens, and the form of the result."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast.checkpoints.results import layer_table
from expertcast.data.batch import TraceBatch
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.routing_file import ABSENT, Routing
from expertcast.data.text import load_documents
from expertcast.data.traces import TraceDataset
from expertcast.predictors.base import PredictorConfig, RouterState
from expertcast.predictors.baselines import QuasiHidden, RouterInput
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import MoEView
from expertcast.training import evaluation as module
from expertcast.training.evaluation import evaluate, evaluate_routing
from tests.families.models import tiny_model
from tests.training.synthetic import Before, Oracle, Same, random_batch, tiny_view


@pytest.fixture(scope="module")
def view() -> MoEView:
    return tiny_view()


@pytest.fixture(scope="module")
def batch(view: MoEView) -> TraceBatch:
    return random_batch(view, 50)


def quasi(view: MoEView, ahead: tuple[int, ...] = (1,)) -> QuasiHidden:
    predictor = QuasiHidden(PredictorConfig(ahead=ahead), view.shape)
    predictor.expert_LED.normal_(std=0.5, generator=torch.Generator().manual_seed(9))
    predictor.bind(view)
    return predictor


def top(view: MoEView, layer: int, logits_E: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ids_1K, weights_1K = view[layer].route(logits_E[None])
    return ids_1K[0], weights_1K[0]


def quasi_recall_by_hand(view: MoEView, batch: TraceBatch, ahead: int, chained: bool) -> list[float]:
    """Per target layer, one token at a time, from the definitions (rows B2, B3, B6 and trap 2)."""
    vectors_LED = quasi(view).expert_LED
    hits = dict.fromkeys(range(ahead, len(view)), 0)
    for token in range(len(batch)):
        executed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for layer in range(len(view) - ahead):
            ids_K, weights_K = executed.get(layer, top(view, layer, batch.logits_TLE[token, layer]))
            default_D = sum(w * vectors_LED[layer, e] for e, w in zip(ids_K.tolist(), weights_K.tolist(), strict=True))
            target = view[layer + ahead]
            with torch.no_grad():
                q_1D = target.router_input((batch.residual_TLD[token, layer] + default_D)[None])
                forecast = top(view, layer + ahead, target.router_logits(q_1D)[0])
            if chained:
                executed[layer + ahead] = forecast
            true_ids, _ = top(view, layer + ahead, batch.logits_TLE[token, layer + ahead])
            hits[layer + ahead] += len(set(forecast[0].tolist()) & set(true_ids.tolist()))
    return [count / len(batch) / view.shape.top_k for count in hits.values()]


@pytest.mark.parametrize("ahead", [1, 2])
def test_recall_is_that_of_a_loop_over_tokens(view: MoEView, batch: TraceBatch, ahead: int) -> None:
    values = evaluate({"quasi_hidden": quasi(view, (1, 2))}, [batch], view, ahead=ahead).as_dict()
    forced = quasi_recall_by_hand(view, batch, ahead, chained=False)
    chained = quasi_recall_by_hand(view, batch, ahead, chained=True)
    assert values["recall_at_k"]["quasi_hidden"]["per_layer"] == pytest.approx(forced)
    assert values["recall_at_k_chained"]["quasi_hidden"]["per_layer"] == pytest.approx(chained)
    assert forced[:ahead] == chained[:ahead]  # the first layers are routed by the model in both
    assert (forced != chained) == (len(view) > 2 * ahead)  # else no forecast is made from a forecast
    assert values["targets"] == list(range(ahead, len(view)))
    assert values["recall_at_k"]["quasi_hidden"]["mean"] == pytest.approx(sum(forced) / len(forced))


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe_lite", "deepseek_v2", "phimoe", "gpt_oss"])
def test_oracle_scores_perfectly_under_every_routing_rule(family: str) -> None:
    view = tiny_view(family)
    batch = random_batch(view, 40)
    values = evaluate({"oracle": Oracle(batch, view.shape).bind(view)}, [batch], view).as_dict()
    for metric in ("recall_at_k", "recall_at_1.5k", "recall_at_2k", "exact_set", "weight_covered"):
        for suffix in ("", "_chained"):
            assert set(values[metric + suffix]["oracle"]["per_layer"]) == {1.0}, metric
    assert values["rank_alignment"]["oracle"]["mean"] == [1.0] * view.shape.top_k
    assert values["cosine"]["oracle"]["mean"] == pytest.approx(1.0)


def test_result_is_plain_and_says_what_was_scored(view: MoEView, batch: TraceBatch) -> None:
    predictors = {"same": Same(PredictorConfig(), view.shape).bind(view), "quasi_hidden": quasi(view)}
    values = evaluate(predictors, [batch], view).as_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    shape = view.shape
    assert (values["tokens"], values["ahead"], values["k"], values["experts"]) == (50, 1, shape.top_k, shape.experts)
    assert values["cosine"]["same"] == {"mean": None, "per_layer": [None] * (len(view) - 1)}
    assert len(values["rank_alignment"]["same"]["per_layer"]) == len(view) - 1
    assert len(values["rank_alignment"]["same"]["per_layer"][0]) == shape.top_k
    bins = values["calibration"]["same"]["bins"]
    assert sum(entry["count"] for entry in bins) == 50 * (len(view) - 1) * shape.experts
    assert values["chance"]["recall_at_k"] == shape.top_k / shape.experts
    assert "recall_at_k_chained" not in evaluate(predictors, [batch], view, chained=False).as_dict()


def test_how_the_tokens_are_batched_does_not_matter(
    view: MoEView, batch: TraceBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictors = {"before": Before(PredictorConfig(), view.shape).bind(view), "quasi_hidden": quasi(view)}
    whole = evaluate(predictors, [batch], view).as_dict()
    monkeypatch.setattr(module, "CHUNK_TOKENS", 6)
    pieces = evaluate(predictors, [batch[:1], batch[1:20], batch[20:]], view).as_dict()
    for metric in ("recall_at_k", "recall_at_k_chained", "weight_covered"):
        for name in predictors:
            assert pieces[metric][name]["per_layer"] == pytest.approx(whole[metric][name]["per_layer"]), metric
    assert (pieces["tokens"], pieces["per_expert"]) == (whole["tokens"], whole["per_expert"])


def test_states_are_made_once_and_previous_tokens_only_when_asked_for(
    view: MoEView, batch: TraceBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []
    original = TraceBatch.state

    def counted(self: TraceBatch, *args: Any, **kwargs: Any) -> Any:
        calls.append(self.previous_TLE is not None)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(TraceBatch, "state", counted)
    router_input = RouterInput(PredictorConfig(), view.shape).bind(view)
    evaluate({"quasi_hidden": quasi(view), "router_input": router_input}, [batch], view)
    assert calls == [False] * len(view)
    calls.clear()
    before = Before(PredictorConfig(), view.shape).bind(view)
    evaluate({"before": before, "router_input": router_input}, [batch], view)
    assert calls == [True] * len(view)


def test_predictor_blind_to_the_routing_scores_the_same_chained(view: MoEView, batch: TraceBatch) -> None:
    values = evaluate({"router_input": RouterInput(PredictorConfig(), view.shape).bind(view)}, [batch], view).as_dict()
    assert values["recall_at_k"] == values["recall_at_k_chained"]
    assert "cosine_chained" not in values
    assert values["calibration"] == values["calibration_chained"]


class Late(Same):
    """Reads the routing at one layer only, as a hybrid may."""

    def logits(self, state: RouterState, ahead: int) -> torch.Tensor:
        return super().logits(state, ahead) if state.layer == 2 else state.router_input_TD[:, : self.shape.experts]


def test_predictor_that_reads_the_routing_at_one_layer_is_chained(view: MoEView, batch: TraceBatch) -> None:
    values = evaluate({"late": Late(PredictorConfig(), view.shape).bind(view)}, [batch], view).as_dict()
    forced, chained = (values[key]["late"]["per_layer"] for key in ("recall_at_k", "recall_at_k_chained"))
    assert forced[:2] == chained[:2]
    assert forced[2] != chained[2]


def test_mistakes_are_named(view: MoEView, batch: TraceBatch) -> None:
    predictors = {"quasi_hidden": quasi(view)}
    with pytest.raises(ExpertcastError, match="no predictor"):
        evaluate({}, [batch], view)
    with pytest.raises(ExpertcastError, match="no tokens to score"):
        evaluate(predictors, [], view)
    with pytest.raises(ExpertcastError, match="ahead=4: the model has 4 MoE layers, use 1 to 3"):
        evaluate(predictors, [batch], view, ahead=4)
    with pytest.raises(ExpertcastError, match=r"quasi_hidden forecasts .* not 2"):
        evaluate(predictors, [batch], view, ahead=2)
    other = find_moe_layers(tiny_model("qwen3_moe", dtype=torch.float32, seed=1))
    with pytest.raises(ExpertcastError, match="quasi_hidden is bound to another model"):
        evaluate(predictors, [batch], other)


def test_table_has_a_row_per_predictor_and_the_chance_level(view: MoEView, batch: TraceBatch) -> None:
    result = evaluate(
        {"quasi_hidden": quasi(view), "same": Same(PredictorConfig(), view.shape).bind(view)}, [batch], view
    )
    lines = layer_table(result.as_dict()).text().splitlines()
    assert [line.split()[0] for line in lines] == ["predictor", "quasi_hidden", "same", "chance"]
    assert lines[0].split()[1:] == ["mean", "1", "2", "3"]
    assert len({len(line) for line in lines}) == 1
    assert float(lines[1].split()[1]) == pytest.approx(result.recall("quasi_hidden"), abs=5e-4)
    assert lines[3].split()[1:] == [f"{view.shape.top_k / view.shape.experts:.3f}"] * 4


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


TOP_K = 4


def windows(traces: TraceDataset, tokenizer: Any) -> list[Tensor]:
    """The test split's tokens, read again from the text."""
    texts = {document.index: document.text for document in load_documents("reference")}
    found = []
    for document in traces.info["documents"]:
        if document["split"] == "test":
            ids = tokenizer(texts[document["index"]])["input_ids"][: document["tokens"]]
            found += torch.tensor(ids).split(traces.info["window"])
    return found


@torch.no_grad()
def run(model: PreTrainedModel, ids_T: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Input of every layer's second norm, and output logits of every gate."""
    residuals: list[Tensor] = []
    logits: list[Tensor] = []
    handles = []
    for layer in model.model.layers:
        handles += [
            layer.post_attention_layernorm.register_forward_hook(lambda m, args, out: residuals.append(args[0][0])),
            layer.mlp.gate.register_forward_hook(lambda m, args, out: logits.append(out[0])),
        ]
    model(ids_T[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return residuals, logits


@torch.no_grad()
def forecasts(model: PreTrainedModel, residuals: list[Tensor], logits: list[Tensor], defaults_LED: Tensor) -> Any:
    """Per target layer, ids forecast from q_l and from s_l: rows B1 to B5 written out for Qwen3-MoE."""
    for layer in range(len(residuals) - 1):
        weights_TK, ids_TK = logits[layer].float().softmax(-1).topk(TOP_K)
        weights_TK = (weights_TK / weights_TK.sum(-1, keepdim=True)).to(logits[layer].dtype).float()
        default_TD = (weights_TK[..., None] * defaults_LED[layer][ids_TK]).sum(1)
        here, after = model.model.layers[layer], model.model.layers[layer + 1]
        q_TD = after.post_attention_layernorm((residuals[layer].float() + default_TD).to(model.dtype))
        s_TD = here.post_attention_layernorm(residuals[layer])
        yield [(vector_TD @ after.mlp.gate.weight.T).topk(TOP_K).indices for vector_TD in (q_TD, s_TD)]


def test_recall_is_that_of_the_model_itself(
    reference_model: PreTrainedModel, reference_tokenizer: Any, reference_traces: TraceDataset
) -> None:
    traces = reference_traces
    hits = torch.zeros(2, len(traces.view) - 1)
    tokens = 0
    for ids_T in windows(traces, reference_tokenizer):
        residuals, logits = run(reference_model, ids_T)
        tokens += len(ids_T)
        for target, pair in enumerate(forecasts(reference_model, residuals, logits, traces.defaults.expert_LED), 1):
            true_TK = logits[target].topk(TOP_K).indices
            for form, forecast_TK in enumerate(pair):
                hits[form, target - 1] += (forecast_TK[:, :, None] == true_TK[:, None, :]).sum()
    expected = hits / (tokens * TOP_K)

    shape = traces.view.shape
    predictors = {
        "quasi_hidden": QuasiHidden(PredictorConfig(), shape),
        "router_input": RouterInput(PredictorConfig(), shape),
    }
    predictors["quasi_hidden"].set_defaults(traces.defaults)
    for predictor in predictors.values():
        predictor.bind(traces.view)
    values = evaluate(predictors, traces.batches("test", 500), traces.view).as_dict()
    assert values["tokens"] == tokens
    # a bf16 forward of other batches rounds differently: a few of a layer's ids differ
    for form, name in enumerate(predictors):
        assert values["recall_at_k"][name]["per_layer"] == pytest.approx(expected[form].tolist(), abs=0.005), name
        assert values["recall_at_k"][name]["mean"] == pytest.approx(expected[form].mean().item(), abs=0.002), name
    assert values["recall_at_k"]["quasi_hidden"]["mean"] > values["recall_at_k"]["router_input"]["mean"] + 0.01


def test_recorded_routing_by_hand() -> None:
    """Two sequences; the last layer runs for the last token of a prompt only."""
    tokens, layers, experts, top_k = 60, 3, 7, 2
    generator = np.random.default_rng(0)
    scores_TLE = generator.random((tokens, layers, experts)) + np.linspace(0, 0.3, experts)
    ids_TLK = np.argsort(-scores_TLE, axis=2)[:, :, :top_k]
    prompt_T = np.zeros(tokens, dtype=bool)
    prompt_T[:4] = prompt_T[40:46] = True
    for token in (0, 1, 2, *range(40, 45)):
        ids_TLK[token, 2] = ABSENT
    routing = Routing(source="a.npz", ids_TLK=ids_TLK, prompt_T=prompt_T, experts=experts)
    used = [Counter(ids_TLK[:30, layer].flatten().tolist()) for layer in range(layers)]
    most = [{expert for expert, _ in sorted(each.items(), key=lambda item: -item[1])[:top_k]} for each in used]
    found: dict[str, list[float]] = {"frequency": [], "previous_token": []}
    for layer in (1, 2):
        hits, requests = Counter[str](), 0
        for token in range(30, tokens):
            true = set(ids_TLK[token, layer].tolist()) - {ABSENT}
            before = set(ids_TLK[token - 1, layer].tolist()) - {ABSENT}
            requests += len(true)
            hits["frequency"] += len(true & most[layer])
            hits["previous_token"] += len(true & (before if before and token != 40 else most[layer]))
        for name, per_layer in found.items():
            per_layer.append(hits[name] / requests)
    result = evaluate_routing(list(found), routing)
    for name, per_layer in found.items():
        assert result["recall_at_k"][name]["per_layer"] == pytest.approx(per_layer), name
    assert (result["counted"], result["tokens"], result["targets"]) == (30, 30, [1, 2])
    assert "0.286" in layer_table(result).text()  # chance: 2 of 7


@pytest.mark.parametrize(("tokens", "layers"), [(1, 3), (3, 1)])
def test_too_little_recorded_routing(tokens: int, layers: int) -> None:
    ids_TLK = np.zeros((tokens, layers, 1), dtype=np.int64)
    routing = Routing(source="a.npy", ids_TLK=ids_TLK, prompt_T=np.zeros(tokens, dtype=bool), experts=2)
    with pytest.raises(ExpertcastError, match=r"a\.npy: forecasts need two tokens and two MoE layers"):
        evaluate_routing(["frequency"], routing)
