"""What bf16 weights can be compressed to (rows E1 to E3)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import torch
import zstandard
from torch import Tensor

from expertcast.checkpoints.bundled import REFERENCE
from expertcast.data.models import load_model
from expertcast.data.moe_layers import find_moe_layers
from expertcast.runtime.storage.codecs import exponent_histogram, make_codec
from expertcast.runtime.storage.layout import BlockLayout, Field

GAUSSIAN = (2048, 1024)
"""Of one matrix of an OLMoE-1B-7B expert."""
SPREAD = 0.02
_MOST = 8 << 20
"""Bytes of weights that are compressed."""


def coded(shape: tuple[int, int] = GAUSSIAN, experts: int = 96) -> list[dict[str, Any]]:
    """A row for the bundled model and one for weights drawn from a normal distribution."""
    generator = torch.Generator().manual_seed(0)
    gaussian = (SPREAD * torch.randn(shape, generator=generator)).to(torch.bfloat16)
    view = find_moe_layers(load_model(REFERENCE))
    weights = [
        tensor.detach()[: max(1, experts // len(view))]
        for layer in view
        for tensor in layer.experts.parameters()
        if tensor.dtype == torch.bfloat16
    ]
    return [_row(REFERENCE, weights), _row("gaussian", [gaussian])]


def _row(name: str, tensors: Iterable[Tensor]) -> dict[str, Any]:
    """Shares are of the weights' own bytes."""
    weights = torch.cat([tensor.flatten() for tensor in tensors])
    histogram = exponent_histogram([weights])
    whole = weights[: _MOST // 2].contiguous()
    words = whole.view(torch.int16).int() & 0xFFFF
    exponents = (words >> 7 & 0xFF).to(torch.uint8).numpy().tobytes()
    others = (words >> 8 & 0x80 | words & 0x7F).to(torch.uint8).numpy().tobytes()
    total = len(exponents) + len(others)
    zstd, lz4hc = zstandard.ZstdCompressor(level=3), pa.Codec("lz4_raw", compression_level=9)
    interleaved = whole.view(torch.uint8).numpy().tobytes()
    return {
        "weights": name,
        "count": len(weights),
        "symbols": float((histogram.counts > 0).sum()) / len(histogram.counts),
        "entropy": histogram.entropy,
        "bound": histogram.bound,
        "zstd": (len(others) + len(zstd.compress(exponents))) / total,
        "zstd_19": (len(others) + len(zstandard.ZstdCompressor(level=19).compress(exponents))) / total,
        "lz4hc": (len(others) + len(lz4hc.compress(exponents))) / total,
        "zstd_interleaved": len(zstd.compress(interleaved)) / total,
        "lz4hc_interleaved": len(lz4hc.compress(interleaved)) / total,
        "mantissas_zstd": len(zstd.compress(others)) / len(others),
        "bitsplit": _bitsplit(whole),
    }


def _bitsplit(weights: Tensor) -> float:
    """Share of the bytes that the package's own codec stores."""
    block = weights.view(torch.uint8)
    field = Field(name="weights", shape=(len(weights),), dtype=torch.bfloat16, offset=0)
    codec = make_codec("bitsplit", BlockLayout(fields=(field,), block_bytes=len(block)))
    return sum(len(part.data) for part in codec.encode(block)) / len(block)
