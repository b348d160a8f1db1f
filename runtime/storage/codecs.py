"""Codecs, which convert an expert's block to its form in a store and back.

block --split--> planes --shards, coded one by one---> parts        in the store, in caches, on the link
block <--recover-- planes <--expand, a part at a time---- parts

A *plane* is a byte string of fixed length that `recover` reads. It is divided into *shards*, and the stored form of a
shard is a *part*. Parts can be read, cached and expanded separately, by any thread; the calls that do the work release
the interpreter lock. The layout of the block determines planes and shards. The size of a compressed part differs from
expert to expert.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import xxhash
import zstandard
from torch import Tensor

from expertcast.predictors.base import Registry
from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.storage.layout import BlockLayout

# Compression of exponents: zstd, configured for entropy coding with almost no matches.
#
# Exponents of trained weights have no repeating patterns. zstd's ordinary levels still find matches of three to six
# bytes by chance, which cost more than they save: with level 1 the output is larger by 1.5 to 2.5 percent of the input
# and takes 1.5 to 2 times as long to decode. With matches of at least seven bytes and a hash table of 64 entries, zstd
# writes Huffman codes for each 128 kB, and matches only for runs of equal bytes.

_PARAMETERS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, chain_log=6, search_log=1, window_log=17,
    write_content_size=True, write_checksum=False, write_dict_id=False,
)  # fmt: skip


class _Coders(threading.local):
    """zstd compressor and decompressor of a thread; their contexts are not thread-safe."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
        self.decompressor = zstandard.ZstdDecompressor()


_CODERS = _Coders()


def compress(data: Tensor) -> Tensor:
    """Compress bytes in host memory to one zstd frame, uint8."""
    return torch.frombuffer(bytearray(_CODERS.compressor.compress(data.numpy().data)), dtype=torch.uint8)


def decompress(frame: Tensor, out: Tensor) -> bool:
    """Decompress a frame into `out`, without the interpreter lock. Returns False if it does not fill `out` exactly."""
    source, target = frame.numpy().data, out.numpy()
    try:
        fits = zstandard.frame_content_size(source) == len(target)
        return fits and _CODERS.decompressor.stream_reader(source).readinto(target) == len(target)
    except zstandard.ZstdError:
        return False


SHARD_ALIGNMENT = 256
"""Bytes. A shard begins at a multiple of it in its plane, so that kernels read whole words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """Byte string of one expert that :meth:`Codec.recover` reads."""

    name: str
    nbytes: int
    compressed: bool = False
    """Whether its parts are compressed, so that their sizes depend on the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Range of one plane that is stored as one part."""

    plane: int
    """Number of the plane."""
    start: int
    """First byte in the plane."""
    nbytes: int
    """Bytes of the range; a compressed part is shorter."""

    def of(self, plane: Tensor) -> Tensor:
        """Return the shard's range of its plane. A tensor of the shard's size is returned unchanged."""
        return plane if len(plane) == self.nbytes else plane[self.start : self.start + self.nbytes]


@dataclass(frozen=True, slots=True)
class Part:
    """Stored form of a shard."""

    data: Tensor
    """uint8, contiguous, in host memory."""
    digest: int | None
    """64-bit xxh3 hash of the data. None: the data was verified before and has stayed in memory since."""

    @classmethod
    def of(cls, data: Tensor) -> Part:
        """Create a part and compute its digest."""
        return cls(data, _digest(data))

    def intact(self) -> bool:
        """Whether the data matches its digest; True without a digest."""
        return self.digest is None or _digest(self.data) == self.digest


class Codec(ABC):
    """Converts blocks of one layout to parts and back, bit for bit; refuses blocks for which it cannot.

    A codec has no state of the experts that it converts, and is thread-safe.

    Subclasses set `planes` and `shards` in their constructor, and implement :meth:`split` and :meth:`recover`.

    Raises:
        ExpertcastError: the codec cannot hold experts of this layout.
    """

    name: ClassVar[str]
    planes: tuple[Plane, ...]
    shards: tuple[Shard, ...]
    """Shards in the order of planes and bytes, which is the order of the parts in the store."""

    def __init__(self, layout: BlockLayout) -> None:
        self.layout = layout

    @abstractmethod
    def split(self, block: Tensor) -> tuple[Tensor, ...]:
        """Split a block, uint8 [block_bytes] in host memory, into planes, each uint8 [nbytes].

        Raises:
            ExpertcastError: the codec cannot hold this block.
        """

    @abstractmethod
    def recover(self, planes: Sequence[Tensor], block: Tensor, shard: Shard | None = None) -> None:
        """Write a block, uint8 [block_bytes] in host memory, from its planes.

        Args:
            planes: each uint8 [nbytes]; a compressed one may be the shard alone (:meth:`Shard.of` accepts both).
            block: the block to write.
            shard: write only the share of the block that depends on this compressed (or only) shard, combined with the
                same range of the plain planes. Other threads write the rest. None: write the whole block.
        """

    def take_plain(self, block: Tensor, plane: Tensor) -> None:
        """Write the plain plane of a block, for codecs with one plain and one compressed plane.

        Args:
            block: uint8 [block_bytes] in host memory.
            plane: uint8 [nbytes], filled with the plane that :meth:`split` returns.
        """
        plane.copy_(self.split(block)[0])

    def new_planes(self, block: Tensor) -> list[Tensor]:
        """Allocate the planes of an expert, uint8 [nbytes] each; a plane may be a view of `block`."""
        return [torch.empty(plane.nbytes, dtype=torch.uint8) for plane in self.planes]

    def encode(self, block: Tensor) -> tuple[Part, ...]:
        """Encode a block, uint8 [block_bytes] in host memory, as one part per shard. Parts may be views of the block.

        Raises:
            ExpertcastError: the codec cannot hold this block.
        """
        planes, coded = self.split(block), []
        for shard in self.shards:
            data = shard.of(planes[shard.plane])
            coded.append(Part.of(compress(data) if self.planes[shard.plane].compressed else data))
        return tuple(coded)

    def expand(self, index: int, part: Part, planes: Sequence[Tensor]) -> None:
        """Verify a part and write its shard into its plane, unless the part already shares the plane's memory.

        Args:
            index: number of the shard in `shards`.
            part: the stored part.
            planes: planes in host memory, as of :meth:`new_planes`; only the range of this shard is written.

        Raises:
            ExpertcastError: the part is damaged or of another shard.
        """
        shard = self.shards[index]
        plane, out = self.planes[shard.plane], shard.of(planes[shard.plane])
        if not part.intact():
            raise self._damaged(index, "is damaged")
        if plane.compressed:
            if not decompress(part.data, out):
                raise self._damaged(index, "does not decode")
        elif len(part.data) != shard.nbytes:
            raise self._damaged(index, f"has {len(part.data)} bytes instead of {shard.nbytes}")
        elif part.data.data_ptr() != out.data_ptr():
            out.copy_(part.data)

    def decode(self, parts: Sequence[Part], block: Tensor) -> None:
        """Decode parts, one per shard, into a block in host memory, in the calling thread.

        Raises:
            ExpertcastError: a part is missing, damaged or of another shard.
        """
        if len(parts) != len(self.shards):
            raise ExpertcastError(f"{len(parts)} parts of an expert that has {len(self.shards)}: pack the store again")
        planes = self.new_planes(block)
        for index, (part, shard) in enumerate(zip(parts, self.shards, strict=True)):
            if not self.planes[shard.plane].compressed:
                planes[shard.plane] = part.data  # a plain part is its plane, without a copy
            self.expand(index, part, planes)
        self.recover(planes, block)

    def _damaged(self, index: int, how: str) -> ExpertcastError:
        plane = self.planes[self.shards[index].plane].name
        return ExpertcastError(
            f"part {index} ({plane!r}, codec {self.name!r}) of an expert in the store {how}: remove the store and "
            "pack it again"
        )

    def _refuse(self, why: str, remedy: str = "choose codec 'raw'") -> ExpertcastError:
        return ExpertcastError(f"codec {self.name!r} cannot hold these experts: {why}; {remedy}")


def shards_of(planes: Sequence[Plane], pieces: int = 1) -> tuple[Shard, ...]:
    """Return one shard per plain plane, and at most `pieces` shards of nearly equal size per compressed plane."""
    shards = []
    for number, plane in enumerate(planes):
        count = pieces if plane.compressed else 1
        size = -(-plane.nbytes // (count * SHARD_ALIGNMENT)) * SHARD_ALIGNMENT
        for start in range(0, plane.nbytes, size):
            shards.append(Shard(plane=number, start=start, nbytes=min(size, plane.nbytes - start)))
    return tuple(shards)


def _digest(data: Tensor) -> int:
    state = xxhash.xxh3_64()
    state.update(data.numpy().data)  # releases the interpreter lock, unlike xxh3_64_intdigest
    return state.intdigest()


# Uncoded blocks.


class Raw(Codec):
    """Stores the block itself as one part. It is read directly into its slot, without other memory or decoding."""

    name = "raw"

    def __init__(self, layout: BlockLayout) -> None:
        super().__init__(layout)
        self.planes = (Plane(name="block", nbytes=layout.block_bytes),)
        self.shards = shards_of(self.planes)

    def split(self, block: Tensor) -> tuple[Tensor, ...]:
        return (block,)

    def new_planes(self, block: Tensor) -> list[Tensor]:
        return [block]

    def recover(self, planes: Sequence[Tensor], block: Tensor, shard: Shard | None = None) -> None:
        if planes[0].data_ptr() != block.data_ptr():
            block.copy_(planes[0])


# 16-bit weights with their high bytes compressed
#
# bf16    [ sign | exponent 7..1 ]  [ exponent 0 | mantissa 6..0 ]
#           high: 2.7 bits of 8        low: 7.97 bits of 8
#
# The paper puts the whole exponent into one byte, and sign and mantissa into the other. This split saves 0.7 percent
# more of the bytes, since the lowest bit of an exponent has little entropy. But decoding then also rotates every
# weight, which takes longer than reading 0.7 percent of the bytes.

_SHARD = 1 << 20
"""Bytes of the high plane per shard."""
_MOST_SHARDS = 8
"""Maximum number of shards."""
_DTYPES = (torch.bfloat16, torch.float16)
_WORDS = 1 << 18
"""Words merged at a time, so that the second pass finds them in a core's cache."""
LOW, HIGH = 0, 1
"""Numbers of the planes: uncompressed low bytes (the paper's SM) and compressed high bytes (the paper's E)."""


class BitSplit(Codec):
    """Stores low bytes uncoded and high bytes compressed, in 1 to 8 shards. fp16 shrinks less: its high byte has two
    bits of mantissa.

    The whole block is coded as 16-bit words, so that every bit is recovered, padding included.
    """

    name = "bitsplit"

    def __init__(self, layout: BlockLayout) -> None:
        super().__init__(layout)
        for field in layout.fields:
            if field.dtype not in _DTYPES:
                raise self._refuse(f"{field.name!r} is {str(field.dtype).removeprefix('torch.')}, not bf16 or fp16")
        half = layout.block_bytes // 2
        self.planes = (Plane(name="low", nbytes=half), Plane(name="high", nbytes=half, compressed=True))
        self.shards = shards_of(self.planes, min(max(1, half // _SHARD), _MOST_SHARDS))

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


# All registrations, in the order of printed tables

CODECS: Registry[Codec] = Registry("codec")
for _codec in (Raw, BitSplit):
    CODECS.register(_codec)


def make_codec(name: str, layout: BlockLayout) -> Codec:
    """Create the codec of a name.

    Raises:
        ExpertcastError: the name is unknown, or the codec cannot hold these experts.
    """
    return CODECS.get(name)(layout)
