"""Lossy precisions as codecs: their bits are those of the packed copies beside a store."""

from __future__ import annotations

import pytest
import torch

from expertcast.runtime.storage.codecs import make_codec
from expertcast.runtime.storage.layout import PRECISIONS
from expertcast.runtime.storage.packed import PackedExperts, PackedLayout
from tests.runtime.storage.codecs.layouts import layout_of, normal_block


@pytest.mark.parametrize("precision", PRECISIONS)
def test_parts_are_packed_copies(precision: str) -> None:
    layout = layout_of((64, 96), (96,), (96, 64))
    blocks = [normal_block(layout, seed) for seed in range(3)]
    packed = PackedLayout.of(layout, precision)
    copies = PackedExperts(packed, layers=1, experts=3)
    copies.fill(0, layout.views(torch.cat(blocks)))
    codec = make_codec(precision, layout)
    for expert, block in enumerate(blocks):
        (part,) = codec.encode(block)
        end = packed.rows_nbytes
        assert torch.equal(part.data[:end], copies.block(expert)[:end])
        expected, found = torch.zeros_like(block), torch.zeros_like(block)
        packed.expand(copies.block(expert), expected)
        codec.decode([part], found)
        assert torch.equal(found, expected)
        found[: len(part.data)] = part.data  # in its own slot
        codec.recover([found[: len(part.data)]], found)
        views = layout.views(found), layout.views(expected)
        assert all(torch.equal(views[0][name], view) for name, view in views[1].items())
