"""Example text: each token's text, and how many of its experts were forecast, against a loop over tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from expertcast.checkpoints.bundled import REFERENCE
from expertcast.data.batch import TraceBatch
from expertcast.data.collect import collect
from expertcast.data.text import load_documents
from expertcast.data.traces import TraceDataset
from expertcast.predictors import Predictor
from expertcast.training.fit import fit
from expertcast.training.report import example_text, pieces

TOKENS = 60


@pytest.fixture(scope="module")
def traces(
    reference_model: PreTrainedModel, reference_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> TraceDataset:
    """Few tokens of several documents, without early attention."""
    folder, documents = tmp_path_factory.mktemp("few") / "traces", load_documents(REFERENCE)
    with torch.random.fork_rng():
        return collect(reference_model, reference_tokenizer, documents, folder, tokens=800, window=64, early_rank=None)


@pytest.fixture(scope="module")
def predictors(traces: TraceDataset) -> dict[str, Predictor]:
    return {name: fit(name, traces).predictor for name in ("router_input", "previous_token")}


@pytest.fixture(scope="module")
def examples(traces: TraceDataset, predictors: dict[str, Predictor]) -> dict[str, Any]:
    return example_text(predictors, traces, "all", passages=3, tokens=TOKENS)


def test_passages_are_the_beginnings_of_documents_of_several_domains(
    examples: dict[str, Any], traces: TraceDataset, reference_tokenizer: PreTrainedTokenizerBase
) -> None:
    assert examples["note"] is None
    assert len({passage["domain"] for passage in examples["passages"]}) == 3
    rows = next(traces.batches("all", traces.token_count()))
    for passage in examples["passages"]:
        own_T = rows.token_T[rows.document_T == passage["document"]][: TOKENS // 3]
        assert passage["token_ids"] == own_T.tolist()
        assert "".join(passage["text"]) == reference_tokenizer.decode(own_T)
        assert {len(found) for found in passage["found"]["router_input"]} == {len(own_T)}


class _FromAPrefixCache(TraceDataset):
    """Documents whose first positions are not 0."""

    def batches(self, *args: Any, **kwargs: Any) -> Iterator[TraceBatch]:
        for batch in super().batches(*args, **kwargs):
            yield replace(batch, position_T=batch.position_T + 512)


def test_documents_that_begin_behind_a_prefix_cache(
    examples: dict[str, Any], traces: TraceDataset, predictors: dict[str, Predictor]
) -> None:
    later = _FromAPrefixCache.open(traces.folder)
    assert example_text(predictors, later, "all", passages=3, tokens=TOKENS) == examples


def test_found_experts_are_those_of_a_loop_over_tokens(
    examples: dict[str, Any], traces: TraceDataset, predictors: dict[str, Predictor]
) -> None:
    view, rows = traces.view, next(traces.batches("all", traces.token_count()))
    for passage in examples["passages"]:
        own = rows[rows.document_T == passage["document"]]
        for name, found in passage["found"].items():
            predictor = predictors[name]
            for token in (0, 1, 7):
                for source in range(len(view) - 1):
                    named = predictor.forecast(own[token : token + 1].state(view, source), 1).topk_ids_TK
                    true_TK, _ = view[source + 1].route(own.logits_TLE[token : token + 1, source + 1])
                    assert found[source][token] == len(set(named.flatten().tolist()) & set(true_TK.flatten().tolist()))


@pytest.mark.parametrize("text", ["plain words", "naïve café — 東京 🙂🙂 ok", "  two  spaces\n\nlines\t"])
def test_pieces_of_a_text_are_the_text(reference_tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = reference_tokenizer(text, add_special_tokens=False)["input_ids"]
    parts = pieces(reference_tokenizer, ids)
    assert len(parts) == len(ids)
    assert "".join(parts) == reference_tokenizer.decode(ids)
    assert "\ufffd" not in "".join(parts)


def test_without_a_tokenizer_the_ids_are_kept_and_the_reason_is_said(
    traces: TraceDataset, predictors: dict[str, Predictor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "info", traces.info | {"model": "no/such-model"})
    found = example_text(predictors, traces, "test", passages=1, tokens=8)
    assert "no/such-model" in found["note"]
    assert found["passages"][0]["text"] is None
    assert len(found["passages"][0]["token_ids"]) == 8


def test_traces_without_ids_are_said_to_hold_none(
    traces: TraceDataset, predictors: dict[str, Predictor], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = traces.batches

    def without_ids(*args: Any, **kwargs: Any) -> Any:
        return (replace(batch, token_T=None) for batch in whole(*args, **kwargs))

    monkeypatch.setattr(traces, "batches", without_ids)
    found = example_text(predictors, traces, "test", passages=1, tokens=8)
    assert found["note"] == "the traces have no token ids"
    assert found["passages"][0]["token_ids"] is None
    assert len(found["passages"][0]["found"]["router_input"][0]) == 8
