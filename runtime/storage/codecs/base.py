"""Base of the codecs: the form of one expert's block in a store, and the way back to the block.

block --split--> planes --shards, each coded by itself--> parts        in the store, in caches, on the link
block <--recover-- planes <--expand, a part at a time---- parts

A *plane* is a run of bytes of known length that `recover` reads. It is stored in *shards*: each can be read, cached and
expanded alone, by any thread; the calls that do the work hold no interpreter lock. A shard in the store is a *part*.
Planes and shards follow from the layout of the block; the parts of a compressed plane differ in length from expert to
expert.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import xxhash
import zstandard
from torch import Tensor

from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.options import check_finite, options_text
from expertcast.runtime.storage.layout import BlockLayout

# Compression of exponents: zstd, set so that it codes the bytes by their frequency and all but gives up on matches.
#
# Exponents of trained weights come in no order that repeats. zstd's ordinary levels find matches of three to six bytes
# in them all the same, by chance, and these cost more than they save: level 1 takes 1.5 to 2.5 points more of the
# bytes, and takes 1.5 to 2 times as long to decode. With matches of at least seven bytes, found through a table of 64
# entries, zstd writes the Huffman code of each 128 kB, and runs of equal bytes where there are any.

_PARAMETERS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, chain_log=6, search_log=1, window_log=17,
    write_content_size=True, write_checksum=False, write_dict_id=False,
)  # fmt: skip


class _Coders(threading.local):
    """zstd's working memory: each thread needs its own."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
        self.decompressor = zstandard.ZstdDecompressor()


_CODERS = _Coders()


def compress(data: Tensor) -> Tensor:
    """One zstd frame, uint8, of some bytes in host memory."""
    return torch.frombuffer(bytearray(_CODERS.compressor.compress(data.numpy().data)), dtype=torch.uint8)


def decompress(frame: Tensor, out: Tensor) -> bool:
    """Fill `out` from a frame, without the interpreter's lock; whether it is a frame of just as many bytes."""
    source, target = frame.numpy().data, out.numpy()
    try:
        fits = zstandard.frame_content_size(source) == len(target)
        return fits and _CODERS.decompressor.stream_reader(source).readinto(target) == len(target)
    except zstandard.ZstdError:
        return False


SHARD_ALIGNMENT = 256
"""Bytes: what a shard covers begins at a multiple of it, so that kernels read whole words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """Bytes of one expert that :meth:`Codec.recover` reads."""

    name: str
    nbytes: int
    compressed: bool = False
    """Whether its parts are shorter than its shards, by how much the weights say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A run of one plane that becomes one part."""

    plane: int
    """Number of the plane."""
    start: int
    """Byte of the plane."""
    nbytes: int
    """Bytes of the plane; a compressed part is shorter."""

    def of(self, plane: Tensor) -> Tensor:
        """Return the shard's bytes of its plane, or all of memory for the shard alone."""
        return plane if len(plane) == self.nbytes else plane[self.start : self.start + self.nbytes]


@dataclass(frozen=True, slots=True)
class Part:
    """A shard as it lies in the store."""

    data: Tensor
    """uint8, contiguous, in host memory."""
    digest: int | None
    """xxh3 of 64 bits, of the data. None: it was compared before, and the data has not left memory since."""

    @classmethod
    def of(cls, data: Tensor) -> Part:
        """A part with the digest that its bytes have now."""
        return cls(data, _digest(data))

    def intact(self) -> bool:
        """Whether the bytes have their digest."""
        return self.digest is None or _digest(self.data) == self.digest


@dataclass(frozen=True, kw_only=True)
class CodecConfig:
    """Base of every codec's configuration; subclasses add fields with a docstring line each."""

    def __post_init__(self) -> None:
        check_finite(self)


class Codec(ABC):
    """Experts of one layout in one form: every block comes back bit for bit, or is refused.

    A codec keeps nothing of the experts that pass through it, and several threads may use one at a time.

    Subclasses say `planes` and `shards` in their constructor, and how a block is split into planes and recovered.

    Raises:
        ExpertcastError: experts of this layout cannot be held.
    """

    name: ClassVar[str]
    config_class: ClassVar[type[CodecConfig]] = CodecConfig
    planes: tuple[Plane, ...]
    shards: tuple[Shard, ...]
    """In the order of planes and bytes: the order in which they are best stored."""

    def __init__(self, config: CodecConfig, layout: BlockLayout) -> None:
        self.config, self.layout = config, layout

    @property
    def text(self) -> str:
        """The shortest text that :func:`expertcast.runtime.storage.codecs.make_codec` makes this codec from."""
        options = options_text(self.config)
        return f"{self.name}:{options}" if options else self.name

    @abstractmethod
    def split(self, block: Tensor) -> tuple[Tensor, ...]:
        """The planes, each uint8 [nbytes], of a block, uint8 [block_bytes] in host memory.

        Raises:
            ExpertcastError: the codec cannot hold this block.
        """

    @abstractmethod
    def recover(self, planes: Sequence[Tensor], block: Tensor, shard: Shard | None = None) -> None:
        """Write the block, uint8 [block_bytes] in host memory, that the planes stand for.

        Args:
            planes: each uint8 [nbytes]; a compressed one may be the shard alone (:meth:`Shard.of` takes both).
            block: the slot's, or one in host memory.
            shard: a compressed one, or the only one: write no more than what follows from it and from the plain planes
                under it; other threads write the rest, from planes of their own. None: all.
        """

    def take_plain(self, block: Tensor, plane: Tensor) -> None:
        """Write the plane that is not compressed, of codecs that have one of each kind: what :meth:`split` gives.

        Args:
            block: uint8 [block_bytes] in host memory.
            plane: uint8 [nbytes].
        """
        plane.copy_(self.split(block)[0])

    def new_planes(self, block: Tensor) -> list[Tensor]:
        """Memory to expand an expert's parts into, uint8 [nbytes] each, before it is recovered into `block`."""
        return [torch.empty(plane.nbytes, dtype=torch.uint8) for plane in self.planes]

    def encode(self, block: Tensor) -> tuple[Part, ...]:
        """The parts, one per shard, of a block: uint8 [block_bytes] in host memory, which a part may be a view of.

        Raises:
            ExpertcastError: the codec cannot hold this block.
        """
        return self._parts(self.split(block))

    def expand(self, index: int, part: Part, planes: Sequence[Tensor]) -> None:
        """Check a part, and write its shard into its plane unless the plane's memory is the part's.

        Args:
            index: which of `shards` the part is.
            part: as it was stored.
            planes: of :meth:`new_planes`, in host memory; other shards keep their bytes.

        Raises:
            ExpertcastError: the part is damaged, or not of this shard.
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
        """All steps at once, in this thread: parts, one per shard, to a block in host memory.

        Raises:
            ExpertcastError: a part is missing, damaged, or not of its shard.
        """
        if len(parts) != len(self.shards):
            raise ExpertcastError(f"{len(parts)} parts of an expert that has {len(self.shards)}: pack the store again")
        planes = self.new_planes(block)
        for index, (part, shard) in enumerate(zip(parts, self.shards, strict=True)):
            if not self.planes[shard.plane].compressed:
                planes[shard.plane] = part.data  # is the plane where it lies
            self.expand(index, part, planes)
        self.recover(planes, block)

    def _parts(self, planes: Sequence[Tensor]) -> tuple[Part, ...]:
        coded = []
        for shard in self.shards:
            data = shard.of(planes[shard.plane])
            coded.append(Part.of(compress(data) if self.planes[shard.plane].compressed else data))
        return tuple(coded)

    def _damaged(self, index: int, how: str) -> ExpertcastError:
        plane = self.planes[self.shards[index].plane].name
        return ExpertcastError(
            f"part {index} ({plane!r}, codec {self.text!r}) of an expert in the store {how}: remove the store, and "
            "pack it again"
        )

    def _refuse(self, why: str, remedy: str = "choose codec 'raw'") -> ExpertcastError:
        return ExpertcastError(f"codec {self.name!r} cannot hold these experts: {why}; {remedy}")


def shards_of(planes: Sequence[Plane], pieces: int = 1) -> tuple[Shard, ...]:
    """One shard for each plane that is not compressed, `pieces` of nearly one length (or fewer) for each that is."""
    shards = []
    for number, plane in enumerate(planes):
        count = pieces if plane.compressed else 1
        size = -(-plane.nbytes // (count * SHARD_ALIGNMENT)) * SHARD_ALIGNMENT
        for start in range(0, plane.nbytes, size):
            shards.append(Shard(plane=number, start=start, nbytes=min(size, plane.nbytes - start)))
    return tuple(shards)


def _digest(data: Tensor) -> int:
    state = xxhash.xxh3_64()
    state.update(data.numpy().data)  # without the interpreter's lock, which the shorter call would hold
    return state.intdigest()
