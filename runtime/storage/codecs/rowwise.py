"""Lossy precisions, row-wise quantised: :mod:`expertcast.runtime.storage.packed` as codecs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from expertcast.runtime.storage.codecs.base import Codec, CodecConfig, Plane, Shard, shards_of
from expertcast.runtime.storage.layout import BlockLayout
from expertcast.runtime.storage.packed import PackedLayout


class RowWise(Codec):
    """A packed block as one part; subclasses name the precision."""

    lossless = False

    def __init__(self, config: CodecConfig, layout: BlockLayout) -> None:
        super().__init__(config, layout)
        self.packed = PackedLayout.of(layout, self.name)
        self.planes = (Plane(name="packed", nbytes=self.packed.block_bytes),)
        self.shards = shards_of(self.planes)

    def split(self, block: Tensor) -> tuple[Tensor, ...]:
        packed = torch.zeros(1, self.packed.block_bytes, dtype=torch.uint8)
        self.packed.pack(self.layout.views(block), packed)
        return (packed[0],)

    def recover(self, planes: Sequence[Tensor], block: Tensor, shard: Shard | None = None) -> None:
        """The plane may be the first bytes of the block."""
        self.packed.expand(planes[0], block)


class Int8(RowWise):
    """9 bits a weight."""

    name = "int8"


class Int4(RowWise):
    """4.5 bits a weight."""

    name = "int4"


class Int2(RowWise):
    """2.5 bits a weight."""

    name = "int2"
