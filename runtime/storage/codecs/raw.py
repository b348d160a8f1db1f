"""Experts as they are."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from expertcast.runtime.storage.codecs.base import Codec, CodecConfig, Plane, Shard, shards_of
from expertcast.runtime.storage.layout import BlockLayout


class Raw(Codec):
    """The block itself, as one part: read straight into the slot, it needs neither memory nor work besides."""

    name = "raw"

    def __init__(self, config: CodecConfig, layout: BlockLayout) -> None:
        super().__init__(config, layout)
        self.planes = (Plane(name="block", nbytes=layout.block_bytes),)
        self.shards = shards_of(self.planes)

    def split(self, block: Tensor) -> tuple[Tensor, ...]:
        return (block,)

    def new_planes(self, block: Tensor) -> list[Tensor]:
        return [block]

    def recover(self, planes: Sequence[Tensor], block: Tensor, shard: Shard | None = None) -> None:
        if planes[0].data_ptr() != block.data_ptr():
            block.copy_(planes[0])
