"""A store of random blocks, without a model around it."""

from __future__ import annotations

import torch
from torch import Tensor

from expertcast.runtime.storage.layout import BlockLayout, Field
from expertcast.runtime.storage.store import ExpertStore


def bytes_layout(nbytes: int) -> BlockLayout:
    """Blocks of one parameter of bytes."""
    field = Field(name="w", shape=(nbytes,), dtype=torch.uint8, offset=0)
    return BlockLayout(fields=(field,), block_bytes=nbytes)


class Blocks(ExpertStore):
    """One layer of `keys` experts."""

    def __init__(self, layout: BlockLayout, keys: int, generator: torch.Generator) -> None:
        self.layout, self.experts, self.layers = layout, keys, 1
        self._bytes = torch.randint(1, 256, (keys, layout.block_bytes), dtype=torch.uint8, generator=generator)

    def block(self, key: int) -> Tensor:
        return self._bytes[key]
