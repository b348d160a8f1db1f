"""Traces of a few hundred tokens in two shards, small enough to be damaged in hundreds of ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from expertcast.data.batch import TraceBatch
from expertcast.data.traces import TraceDataset

SETTINGS: dict[str, Any] = {"tokens": 600, "window": 64, "batch_size": 4, "shard_bytes": 300 * 11_916}


def content(folder: Path) -> list[Any]:
    """Everything that a predictor could learn from traces."""
    traces = TraceDataset.open(folder)
    batch = TraceBatch.cat(list(traces.batches("all", 128)))
    tensors = [batch.residual_TLD.float(), batch.logits_TLE, batch.document_T, batch.position_T]
    assert batch.early_TLD is not None
    assert traces.stand_in is not None
    tensors += [batch.early_TLD.float(), *traces.defaults.as_tensors().values()]
    tensors += [tensor.float() for tensor in traces.stand_in.state_dict().values()]
    tensors += [layer.router_input(torch.ones(1, 192)) for layer in traces.view]
    return [*(tensor.tolist() for tensor in tensors), traces.view.fingerprint(), traces.documents, traces.info["model"]]
