"""Traces of a few hundred tokens in two shards, small enough to be damaged in hundreds of ways."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from expertcast.data.batch import TraceBatch
from expertcast.data.trace_format import tensors_digest
from expertcast.data.traces import TraceDataset

SETTINGS: dict[str, Any] = {"tokens": 600, "window": 64, "batch_size": 4, "shard_bytes": 512 * 371}
MANY: dict[str, Any] = {"tokens": 6000, "window": 64}


def whole(traces: TraceDataset, split: str = "all", **options: Any) -> TraceBatch:
    return TraceBatch.cat(list(traces.batches(split, 1000, **options)))


def content(folder: Path) -> list[Any]:
    """Everything that a predictor could learn from traces."""
    traces = TraceDataset.open(folder)
    batch = whole(traces)
    assert batch.early_TLD is not None
    assert traces.stand_in is not None
    tensors = {"residual": batch.residual_TLD, "logits": batch.logits_TLE, "early": batch.early_TLD}
    tensors |= {"document": batch.document_T, "position": batch.position_T}
    tensors |= traces.defaults.as_tensors() | traces.stand_in.state_dict()
    normed = [layer.router_input(torch.ones(1, traces.view.shape.hidden)) for layer in traces.view]
    tensors |= {str(layer): each.detach() for layer, each in enumerate(normed)}
    return [tensors_digest(tensors), traces.view.fingerprint(), traces.documents, traces.info["model"]]


class Crash:
    """Ends what runs after some files have been replaced, as a kill does: nothing is tidied up."""

    def __init__(self, patch: pytest.MonkeyPatch, left: int) -> None:
        self.left, self._replace = left, os.replace
        patch.setattr(os, "replace", self)

    def __call__(self, source: Path, target: Path) -> None:
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        self._replace(source, target)
