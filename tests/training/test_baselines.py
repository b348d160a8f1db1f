"""Recall of what needs no training, against counts by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from expertcast.data.batch import TraceBatch
from expertcast.data.traces import TraceDataset
from expertcast.training.evaluation import baseline_recall


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
