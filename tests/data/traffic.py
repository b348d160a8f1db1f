"""Traces' documents as if they were requests to a server."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import PreTrainedModel

from expertcast.data.batch import TraceBatch
from expertcast.data.live import Conversations, LiveDocument, LiveOptions, LiveTraces
from expertcast.data.models import load_tokenizer
from expertcast.data.text import Document
from expertcast.data.traces import TraceDataset


def whole(traces: TraceDataset, split: str = "all") -> TraceBatch:
    return TraceBatch.cat(list(traces.batches(split, 1000)))


def texts(traces: TraceDataset) -> dict[tuple[int, ...], TraceBatch]:
    """Documents' rows by their tokens."""
    rows = whole(traces)
    assert rows.token_T is not None
    own = [rows[rows.document_T == document.index] for document in traces.documents]
    return {tuple(batch.token_T.tolist()): batch for batch in own if batch.token_T is not None}


def as_traffic(traces: TraceDataset, model: PreTrainedModel, folder: Path, *, known: bool = True) -> TraceDataset:
    """Live traces of the same documents, in the folder; not `known`: with hashes as if they were of other text."""
    config = json.loads(model.config.to_json_string(use_diff=False))
    options = LiveOptions(tokens=10**6, window=10**6)
    made = LiveTraces(folder, traces.view, options, config=config, logits=torch.bfloat16, dtype="bfloat16")
    conversations = Conversations(load_tokenizer("reference"))
    for ids, rows in texts(traces).items():
        own = conversations.hash(ids) if known else Document(0, str(ids)).hash
        made.add(
            LiveDocument(
                hash=own, token_T=torch.tensor(ids), residual_TLD=rows.residual_TLD,
                logits_TLE=rows.logits_TLE,
            )
        )  # fmt: skip
    made.close()
    return TraceDataset.open(folder)
