"""Layouts and blocks for the codecs' tests."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from expertcast.runtime.storage import codecs
from expertcast.runtime.storage.layout import BlockLayout


def layout_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> BlockLayout:
    """Parameters w0, w1, ... of these shapes, one after another."""
    return BlockLayout.of_tensors({f"w{i}": torch.empty(shape, dtype=dtype) for i, shape in enumerate(shapes)})


def cut_into(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have bitsplit cut planes of any size into this number of shards."""
    monkeypatch.setattr(codecs, "_SHARD", 1)
    monkeypatch.setattr(codecs, "_MOST_SHARDS", count)


def every_pattern(layout: BlockLayout) -> Tensor:
    """A block that holds every 16-bit pattern: NaNs with every payload, denormals, -0."""
    words = torch.arange(layout.block_bytes // 2, dtype=torch.int32).to(torch.int16)
    return words.view(torch.uint8).clone()


def normal_block(layout: BlockLayout, seed: int = 0) -> Tensor:
    """Normal weights and empty padding."""
    block = torch.zeros(layout.block_bytes, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    for view in layout.views(block).values():
        view.copy_(torch.randn(view.shape, generator=generator) * 0.02)
    return block


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Also where a NaN is not equal to itself."""
    return found.dtype == expected.dtype and torch.equal(
        found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
    )
