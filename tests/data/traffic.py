"""Requests to a server: those of documents in traces, and made ones whose rows can be told from their number."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from expertcast_vllm.traffic import Conversations, LiveDocument, LiveOptions, LiveTraces
from transformers import PreTrainedModel

from expertcast.data.batch import TraceBatch
from expertcast.data.models import load_tokenizer
from expertcast.data.text import Document, text_hash
from expertcast.data.trace_format import rounded
from expertcast.data.traces import TraceDataset
from expertcast.predictors.view import ModelShape
from tests.data.small_traces import whole
from tests.plain_view import LinearRouter, plain_view

SHAPE = ModelShape(layers=3, experts=8, top_k=2, hidden=16)


def texts(traces: TraceDataset) -> dict[tuple[int, ...], TraceBatch]:
    """Documents' rows by their tokens."""
    rows = whole(traces)
    assert rows.token_T is not None
    own = [rows[rows.document_T == document.index] for document in traces.documents]
    return {tuple(batch.token_T.tolist()): batch for batch in own if batch.token_T is not None}


def as_traffic(traces: TraceDataset, model: PreTrainedModel, folder: Path, *, known: bool = True) -> TraceDataset:
    """Live traces of the same documents, in the folder; not `known`: with hashes as if they were of other text."""
    config = json.loads(model.config.to_json_string(use_diff=False))
    options = LiveOptions(tokens=10**5, window=10**6)
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
    made.commit()
    return TraceDataset.open(folder)


def request(number: int) -> LiveDocument:
    generator, tokens = torch.Generator().manual_seed(number), 3 + number % 40
    return LiveDocument(
        hash=text_hash(str(number)),
        token_T=torch.full((tokens,), number),
        residual_TLD=rounded(torch.randn(tokens, SHAPE.layers, SHAPE.hidden, generator=generator).bfloat16()),
        logits_TLE=torch.randn(tokens, SHAPE.layers, SHAPE.experts, generator=generator),
    )


def writer(folder: Path, numbers: Iterable[int] = (), **options: Any) -> LiveTraces:
    """Of a model that transformers does not know, in shards of about a hundred tokens; these requests are added."""
    generator = torch.Generator().manual_seed(0)
    routers = [LinearRouter(torch.randn(8, 16, generator=generator), top_k=2) for _ in range(SHAPE.layers)]
    view = plain_view(SHAPE, routers, [torch.nn.RMSNorm(16) for _ in routers], "made")
    settings = LiveOptions(**{"tokens": 1_000_000, "window": 32, "shard_bytes": 100 * 200, **options})
    made = LiveTraces(folder, view, settings, config={}, logits=torch.float32, dtype="float32")
    for number in numbers:
        made.add(request(number))
    return made
