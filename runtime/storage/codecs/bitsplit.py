"""Bytes of 16-bit weights apart: the high ones, which compress, and the low ones, which do not (rows E1 to E3, E11).

bf16    [ sign | exponent 7..1 ]  [ exponent 0 | mantissa 6..0 ]
          high: 2.7 bits of 8        low: 7.97 bits of 8

The paper keeps the whole exponent in one byte and sign and mantissa in the other, which saves .7 points more of the
bytes: the lowest bit of an exponent says little. But then putting the bits back takes a rotation of every weight beside
the interleaving of bytes, and that costs more time than .7 points of the reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.storage.codecs.base import Codec, CodecConfig, Plane, Shard, shards_of
from expertcast.runtime.storage.layout import BlockLayout

_SHARD = 1 << 20
"""Bytes of the high plane that a shard covers by default."""
_MOST_SHARDS = 8
_DTYPES = (torch.bfloat16, torch.float16)
_WORDS = 1 << 18
"""Words merged at a time on the host: the second pass then finds them in a core's cache."""
LOW, HIGH = 0, 1
"""Planes. The low one is all that is not compressed (the paper's SM), the high one what is (its E)."""


@dataclass(frozen=True, kw_only=True)
class BitSplitConfig(CodecConfig):
    """How the compressed plane is cut."""

    shards: int | None = None
    """K, the shards of the compressed plane; none: one per MiB of it, 1 to 8."""

    def __post_init__(self) -> None:
        if self.shards is not None and not 1 <= self.shards <= 64:
            raise ExpertcastError(f"shards={self.shards}: give a number from 1 to 64, or none")


class BitSplit(Codec):
    """Low bytes as they are, high bytes compressed in K shards. fp16 gains less: two of its high bits are mantissa.

    The whole block is taken for 16-bit words, so that any bits come back, those of padding too.
    """

    name = "bitsplit"
    config_class = BitSplitConfig

    def __init__(self, config: BitSplitConfig, layout: BlockLayout) -> None:
        super().__init__(config, layout)
        for field in layout.fields:
            if field.dtype not in _DTYPES:
                raise self._refuse(f"{field.name!r} is {str(field.dtype).removeprefix('torch.')}, not bf16 or fp16")
        half = layout.block_bytes // 2
        self.planes = (Plane(name="low", nbytes=half), Plane(name="high", nbytes=half, compressed=True))
        self.shards = shards_of(self.planes, config.shards or min(max(1, half // _SHARD), _MOST_SHARDS))

    def split(self, block: Tensor) -> tuple[Tensor, ...]:
        low, high = block.view(-1, 2).unbind(1)
        return low.contiguous(), high.contiguous()

    def take_plain(self, block: Tensor, plane: Tensor) -> None:
        np.copyto(plane.numpy(), block.numpy().view(np.uint16), casting="unsafe")  # keeps the low byte

    def recover(self, planes: Sequence[Tensor], block: Tensor, shard: Shard | None = None) -> None:
        """A shard of the high plane needs the low plane under it; one of the low plane stands for the whole block."""
        words = block.view(torch.int16)
        if shard is not None:
            words, planes = shard.of(words), [shard.of(plane) for plane in planes]
        merge(planes[LOW], planes[HIGH], words)


def merge(low: Tensor, high: Tensor, words: Tensor) -> None:
    """Write `words`, int16 [N], from `low` and `high`, uint8 [N], all on one device.

    On the CPU numpy writes them without the interpreter's lock; copies of every other byte would take twice as long.
    """
    if words.device.type != "cpu":
        torch.bitwise_or(high.to(torch.int16) << 8, low, out=words)
        return
    lows, highs, out = low.numpy(), high.numpy(), words.numpy().view(np.uint16)
    for start in range(0, len(out), _WORDS):
        chunk = slice(start, start + _WORDS)
        np.left_shift(highs[chunk], 8, out=out[chunk], dtype=np.uint16)
        np.bitwise_or(out[chunk], lows[chunk], out=out[chunk])
