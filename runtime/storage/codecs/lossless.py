"""Lossless codecs: uncoded blocks, and 16-bit weights with their high bytes compressed.

bf16    [ sign | exponent 7..1 ]  [ exponent 0 | mantissa 6..0 ]
          high: 2.7 bits of 8        low: 7.97 bits of 8

The paper puts the whole exponent into one byte, and sign and mantissa into the other. This split saves 0.7 percent more
of the bytes, since the lowest bit of an exponent has little entropy. But decoding then also rotates every weight,
which takes longer than reading 0.7 percent of the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import pydantic
import torch
from torch import Tensor

from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.storage.codecs.base import Codec, CodecConfig, Plane, Shard, shards_of
from expertcast.runtime.storage.layout import BlockLayout

# Uncoded blocks.


class Raw(Codec):
    """Stores the block itself as one part. It is read directly into its slot, without other memory or decoding."""

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


# Statistics of exponents, and the lower bound on size that follows for lossless codecs.

_SHIFTS = {torch.bfloat16: 7, torch.float16: 10}
"""Bits below the exponent."""
_MASKS = {torch.bfloat16: 0xFF, torch.float16: 0x1F}
_BITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ExponentHistogram:
    """Counts of the exponents of 16-bit floats of one type."""

    counts: Tensor
    """int64 [256] (bf16) or [32] (fp16), by the biased exponent."""

    @property
    def entropy(self) -> float:
        """Entropy H of the exponents in bits; 0 without weights."""
        p = self.counts[self.counts > 0].double() / self.counts.sum()
        return float(-(p * p.log2()).sum())

    @property
    def bound(self) -> float:
        """Smallest coded size as a fraction of the bytes, if one table codes each exponent separately and sign and
        mantissa stay uncoded: (8 + H) / 16 for bf16.

        The paper's three models have bounds of .6657, .6602 and .6596. Its 68% for zstd refers to split planes.
        """
        exponent_bits = len(self.counts).bit_length() - 1
        return (_BITS - exponent_bits + self.entropy) / _BITS


def exponent_histogram(tensors: Iterable[Tensor]) -> ExponentHistogram:
    """Count the exponents of tensors, which are read one at a time.

    Raises:
        ExpertcastError: there is no tensor, or one is neither bf16 nor fp16, or not of the first one's type.
    """
    counts: Tensor | None = None
    dtype = None
    for tensor in tensors:
        dtype = tensor.dtype if dtype is None else dtype
        if tensor.dtype != dtype or dtype not in _SHIFTS:
            raise ExpertcastError(f"exponents of {tensor.dtype}: give tensors of one type, bf16 or fp16")
        mask = _MASKS[dtype]
        for part in torch.split(tensor.detach(), 1):  # row by row, since counting makes copies
            exponents = part.contiguous().view(torch.int16).flatten() >> _SHIFTS[dtype] & mask
            found = torch.bincount(exponents, minlength=mask + 1).cpu()
            counts = found if counts is None else counts + found
    if counts is None:
        raise ExpertcastError("an exponent histogram of no tensors: give at least one")
    return ExponentHistogram(counts=counts)


_SHARD = 1 << 20
"""Bytes of the high plane per shard, by default."""
_MOST_SHARDS = 8
"""Maximum number of shards, by default."""
_DTYPES = (torch.bfloat16, torch.float16)
_WORDS = 1 << 18
"""Words merged at a time, so that the second pass finds them in a core's cache."""
LOW, HIGH = 0, 1
"""Numbers of the planes: uncompressed low bytes (the paper's SM) and compressed high bytes (the paper's E)."""


@dataclass(frozen=True, kw_only=True)
class BitSplitConfig(CodecConfig):
    """Division of the compressed plane into shards."""

    shards: Annotated[int, pydantic.Field(ge=1, le=64)] | None = None
    """Number K of shards of the compressed plane; none: one per MiB, 1 to 8."""


class BitSplit(Codec):
    """Stores low bytes uncoded and high bytes compressed in K shards. fp16 shrinks less: its high byte has two bits
    of mantissa.

    The whole block is coded as 16-bit words, so that every bit is recovered, padding included.
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
        np.copyto(plane.numpy(), block.numpy().view(np.uint16), casting="unsafe")  # the cast keeps the low byte

    def recover(self, planes: Sequence[Tensor], block: Tensor, shard: Shard | None = None) -> None:
        """Write the words of a shard of the high plane; the shard of the low plane covers the whole block."""
        words = block.view(torch.int16)
        if shard is not None:
            words, planes = shard.of(words), [shard.of(plane) for plane in planes]
        merge(planes[LOW], planes[HIGH], words)


def merge(low: Tensor, high: Tensor, words: Tensor) -> None:
    """Write `words`, int16 [N], from `low` and `high`, uint8 [N].

    numpy releases the interpreter lock meanwhile. Strided copies of the bytes would take twice as long.
    """
    lows, highs, out = low.numpy(), high.numpy(), words.numpy().view(np.uint16)
    for start in range(0, len(out), _WORDS):
        chunk = slice(start, start + _WORDS)
        np.left_shift(highs[chunk], 8, out=out[chunk], dtype=np.uint16)
        np.bitwise_or(out[chunk], lows[chunk], out=out[chunk])
