"""Evaluation on traces of the reference model, against the model itself run here without any of the tracing code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast.data.text import load_documents
from expertcast.data.traces import TraceDataset
from expertcast.predictors.base import PredictorConfig
from expertcast.predictors.baselines import QuasiHidden, RouterInput
from expertcast.training.evaluation import evaluate

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
