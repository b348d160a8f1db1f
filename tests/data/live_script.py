"""Writes traces of made requests until it is killed.

python -m tests.data.live_script FOLDER
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch

from expertcast.data.live import LiveDocument, LiveOptions, LiveTraces
from expertcast.data.text import text_hash
from expertcast.predictors.view import ModelShape, MoEView
from tests.plain_view import LinearRouter, plain_view

SHAPE = ModelShape(layers=3, experts=8, top_k=2, hidden=16)


def view() -> MoEView:
    """Of a model that transformers does not know."""
    generator = torch.Generator().manual_seed(0)
    routers = [LinearRouter(torch.randn(8, 16, generator=generator), top_k=2) for _ in range(SHAPE.layers)]
    return plain_view(SHAPE, routers, [torch.nn.RMSNorm(16) for _ in routers], "made")


def request(number: int) -> LiveDocument:
    """The rows of a request can be told from its number."""
    generator, tokens = torch.Generator().manual_seed(number), 3 + number % 40
    return LiveDocument(
        hash=text_hash(str(number)),
        token_T=torch.full((tokens,), number),
        residual_TLD=torch.randn(tokens, SHAPE.layers, SHAPE.hidden, generator=generator).bfloat16(),
        logits_TLE=torch.randn(tokens, SHAPE.layers, SHAPE.experts, generator=generator),
    )


def writer(folder: Path, **options: int) -> LiveTraces:
    """Shards of about a hundred tokens."""
    settings = LiveOptions(**{"tokens": 1_000_000, "window": 32, "shard_bytes": 100 * 200, **options})  # type: ignore[arg-type]
    return LiveTraces(folder, view(), settings, config={}, logits=torch.float32, dtype="float32")


if __name__ == "__main__":
    live = writer(Path(sys.argv[1]))
    for number in itertools.count(len(live.documents)):
        live.add(request(number))
