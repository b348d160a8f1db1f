"""Baselines in a checkpoint, and the ledger of costs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from expertcast.checkpoints.results import ledger_table
from expertcast.commands.predictors import ledger_of
from expertcast.data.batch import TraceBatch
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ModelShape
from expertcast.predictors.base import LogOdds, PredictorConfig
from expertcast.predictors.baselines import Frequency
from expertcast.training.evaluation import baseline_recall, ledger_entry
from expertcast.training.fit import forecast_seconds
from expertcast.training.scoring import Fitted


def chosen(traces: TraceDataset, split: str) -> tuple[Tensor, TraceBatch]:
    """Ids of the routed experts [T, L, K] of a split."""
    batch = TraceBatch.cat(list(traces.batches(split, 1000)))
    return torch.stack([layer.route(batch.logits_TLE[:, layer.index])[0] for layer in traces.view], dim=1), batch


@pytest.mark.parametrize("ahead", [1, 3])
def test_recall_is_that_of_a_count(ahead: int, reference_traces: TraceDataset) -> None:
    found = baseline_recall(reference_traces, "test", ahead)
    (train_TLK, _), (test_TLK, batch) = chosen(reference_traces, "train"), chosen(reference_traces, "test")
    top_k = test_TLK.shape[2]
    follows_T = batch.document_T[1:] == batch.document_T[:-1]
    assert list(found) == ["frequency", "previous_token"]
    for place, layer in enumerate(range(ahead, len(reference_traces.view))):
        most = set(train_TLK[:, layer].flatten().bincount(minlength=64).topk(top_k).indices.tolist())
        sets = [set(ids.tolist()) for ids in test_TLK[:, layer]]
        usual = [len(most & own) / top_k for own in sets]
        assert found["frequency"]["per_layer"][place] == pytest.approx(sum(usual) / len(usual), abs=1e-6)
        last = [usual[0]] + [
            len(sets[token] & sets[token + 1]) / top_k if follows_T[token] else usual[token + 1]
            for token in range(len(sets) - 1)
        ]
        assert found["previous_token"]["per_layer"][place] == pytest.approx(sum(last) / len(last), abs=1e-6)


def test_an_entry_by_hand() -> None:
    """Counts of 3 x 8 in 8 bytes and weights in 4, and three numbers for each of two calibrated pairs."""
    predictor = Frequency(PredictorConfig(), ModelShape(layers=3, experts=8, top_k=2, hidden=4))
    predictor.calibration = {1: [LogOdds(1.0, 0.0, 0.0, 1.0)] * 2}
    entry = ledger_entry(predictor, {"seconds": 2.0, "known_seconds": 3.0, "collection_s": 60.0}, 2.5e-4)
    assert entry == {
        "parameters": 48 + 6, "bytes": 24 * 8 + 24 * 4 + 6 * 8, "forecast_ms": 0.25, "training_s": 5.0,
        "collection_s": 60.0,
    }  # fmt: skip
    unknown = ledger_entry(predictor, {}, None)
    assert [unknown[key] for key in ("forecast_ms", "training_s", "collection_s")] == [None, None, None]
    table = ledger_table({"known": entry, "unknown": unknown}).text().splitlines()
    assert table[0].split("  ")[0] == "predictor"
    assert table[1].split() == ["known", "54", "336", "0.250", "5.0", "60.0"]
    assert table[2].split() == ["unknown", "54", "336", "-", "-", "-"]


def test_costs_of_fitted_predictors(fitted_predictors: dict[str, Fitted], reference_traces: TraceDataset) -> None:
    """Every one of them: all are timed, on one thread, and the collection's seconds are those of the traces."""
    threads = torch.get_num_threads()
    predictors = {name: made.predictor for name, made in fitted_predictors.items()}
    ledger = ledger_of(fitted_predictors, forecast_seconds(predictors, reference_traces, "test", 1))
    assert torch.get_num_threads() == threads
    assert list(ledger) == list(fitted_predictors)
    for name, entry in ledger.items():
        assert 0 < entry["forecast_ms"] < 1e3, name
        assert entry["training_s"] > 0, name
        assert entry["collection_s"] == reference_traces.info["collection_s"] > 0, name
    candidates = fitted_predictors["hybrid"].report["candidates"]
    assert ledger["hybrid"]["training_s"] > sum(report["seconds"] for report in candidates.values())
    assert ledger["linear"]["parameters"] > ledger["quasi_hidden"]["parameters"] > ledger["router_input"]["parameters"]
