"""Quality of speculative runs: against an independent implementation, and order relations that must hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast.data.text import load_documents
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError, MoEView, Predictor, PredictorConfig, predictor_class
from expertcast.predictors.baselines import Frequency, QuasiHidden
from expertcast.runtime.engine.front import speculate
from expertcast.runtime.quality import QualityRun, measure_quality, text_windows


@pytest.fixture(scope="module")
def windows(reference_tokenizer: Any) -> dict[str, Tensor]:
    texts: dict[str, list[str]] = {}
    for document in load_documents("reference"):
        texts.setdefault(document.domain, []).append(document.text)
    return {
        domain: text_windows(reference_tokenizer, texts[domain], length=48, count=3) for domain in ("prose", "math")
    }


def _named(name: str, view: MoEView) -> Predictor:
    cls = predictor_class(name)
    return cls(cls.config_class(), view.shape).bind(view)


def _log_probs(model: PreTrainedModel, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float().log_softmax(-1)


def test_measured_against_the_definitions(
    reference_model: PreTrainedModel, reference_view: MoEView, windows: dict[str, Tensor]
) -> None:
    predictor = _named("next_norm", reference_view)
    result = measure_quality(
        reference_model, reference_view, windows, {"next_norm": QualityRun(predictor=predictor)}, batch_size=2
    )
    with torch.no_grad():
        exact = {domain: _log_probs(reference_model, ids) for domain, ids in windows.items()}
        with speculate(reference_model, reference_view, predictor):
            run = {domain: _log_probs(reference_model, ids) for domain, ids in windows.items()}
    assert result["tokens"] == 2 * 3 * 47
    for domain, ids in windows.items():
        p, q = exact[domain][:, :-1], run[domain][:, :-1]
        got = result["runs"]["next_norm"]["domains"][domain]
        nll = -q.gather(-1, ids[:, 1:, None]).mean()
        assert got["perplexity"] == pytest.approx(float(nll.exp()), rel=2e-2)
        assert got["kl"] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=5e-2)
        assert got["top1_agreement"] == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).float().mean()), abs=2e-2)
        nll = -p.gather(-1, ids[:, 1:, None]).mean()
        assert result["runs"]["exact"]["domains"][domain]["perplexity"] == pytest.approx(float(nll.exp()), rel=2e-2)


def test_what_must_hold(
    reference_model: PreTrainedModel,
    reference_view: MoEView,
    reference_traces: TraceDataset,
    windows: dict[str, Tensor],
) -> None:
    """No executed forecasts change nothing; better forecasts and fewer layers lose less."""
    shape = reference_view.shape
    quasi = QuasiHidden(PredictorConfig(), shape)
    quasi.set_defaults(reference_traces.defaults)
    quasi.bind(reference_view)
    previous = predictor_class("previous_token")(Frequency.config_class(), shape).bind(reference_view)
    late = list(range(6, 12))
    runs = {
        "nothing": QualityRun(predictor=quasi, layers=[]),
        "quasi_hidden": QualityRun(predictor=quasi),
        "hybrid": QualityRun(predictor=quasi, layers=late),
        "previous_token": QualityRun(predictor=previous),
    }
    got = measure_quality(reference_model, reference_view, windows, runs)["runs"]
    for name in ("exact", "nothing"):
        assert got[name]["kl"] == pytest.approx(0, abs=1e-6)
        assert got[name]["top1_agreement"] == 1.0
        assert got[name]["executed_recall"]["per_layer"] == [1.0] * 11
    assert got["nothing"]["perplexity"] == got["exact"]["perplexity"]
    assert 0 < got["hybrid"]["kl"] < got["quasi_hidden"]["kl"] < got["previous_token"]["kl"]
    assert got["hybrid"]["executed_recall"]["per_layer"][:5] == [1.0] * 5
    assert 0.4 < got["quasi_hidden"]["executed_recall"]["mean"] < got["hybrid"]["executed_recall"]["mean"] < 1
    assert got["previous_token"]["executed_recall"]["mean"] < got["quasi_hidden"]["executed_recall"]["mean"]


def test_bad_input(reference_model: PreTrainedModel, reference_view: MoEView, reference_tokenizer: Any) -> None:
    run = QualityRun(predictor=_named("next_norm", reference_view))
    with pytest.raises(ExpertcastError, match="windows of one token have no token to score"):
        measure_quality(reference_model, reference_view, {"a": torch.ones(3, 1).long()}, {"a": run})
    with pytest.raises(ExpertcastError, match="no text has 900 tokens"):
        text_windows(reference_tokenizer, ["short"], length=900, count=1)
