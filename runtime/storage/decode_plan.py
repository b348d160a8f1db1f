"""In which pieces a coded expert is read, and what can be decoded once which of them are there.

A codec that compresses a plane has the plain planes lie under it byte by byte, so that a compressed shard can be put
back together as soon as it and the bytes under it have come: the disk need not be waited for to the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from expertcast.runtime.storage.codecs import Codec, Part
from expertcast.runtime.storage.direct_read import SECTOR

CUT = 1 << 20
"""Bytes, about: plain parts are read in such pieces where something can be decoded sooner for it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What is read at once, of one part."""

    part: int
    start: int = 0
    """Byte of the part, a multiple of a sector."""
    stop: int | None = None
    """None: its end."""


@dataclass(frozen=True, slots=True)
class Job:
    """What one thread does at a time."""

    parts: tuple[int, ...]
    """That it checks and expands."""
    pieces: tuple[int, ...]
    """That it needs."""
    shard: int | None = None
    """The compressed shard that is recovered; None: all of the block, or nothing where `checks`."""
    checks: bool = False
    """Whether it only compares parts with their digests."""


class DecodePlan:
    """The same for all experts of a codec."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        shards = range(len(codec.shards))
        packed = [index for index in shards if codec.planes[codec.shards[index].plane].compressed]
        plain = [index for index in shards if index not in packed]
        pieces, jobs = [Piece(index) for index in packed], []
        for index in plain:
            size = codec.shards[index].nbytes
            cuts = range(0, max(1, size - CUT // 2), CUT) if packed else (0,)
            starts = list(cuts)
            pieces += [Piece(index, start, stop) for start, stop in zip(starts, [*starts[1:], None], strict=True)]
        for index in packed:
            shard = codec.shards[index]
            under = [
                number
                for number, piece in enumerate(pieces)
                if piece.part == index
                or (
                    piece.part in plain
                    and piece.start < shard.start + shard.nbytes
                    and (piece.stop is None or piece.stop > shard.start)
                )
            ]
            jobs.append(Job((index,), tuple(under), shard=index))
        everything = tuple(number for number, piece in enumerate(pieces) if piece.part in plain)
        if plain:
            jobs.append(Job(tuple(plain), everything, checks=bool(packed)))
        self.pieces: tuple[Piece, ...] = tuple(pieces)
        """In the order in which they are read, compressed ones first: each piece of a plain part then makes a job
        ready, and threads decode while the rest is read."""
        self.jobs: tuple[Job, ...] = tuple(jobs)
        self.scratch_bytes = max((codec.shards[index].nbytes for index in packed), default=0)
        """Of memory that a thread needs to do a job."""

    def run(self, job: Job, parts: Sequence[Part], scratch: Tensor, block: Tensor) -> None:
        """Do one job of an expert.

        Args:
            job: all of its pieces have come.
            parts: of the expert, where they were read; those without a digest have been compared.
            scratch: uint8 [scratch_bytes] of the thread's own, for the compressed shard.
            block: uint8 [block_bytes], what follows from the job is written.

        Raises:
            ExpertcastError: a part is damaged.
        """
        codec = self._codec
        planes = [scratch] * len(codec.planes)
        for index, shard in enumerate(codec.shards):
            if not codec.planes[shard.plane].compressed:
                planes[shard.plane] = parts[index].data
        alone = None if job.shard is None else codec.shards[job.shard]
        if alone is not None:
            planes[alone.plane] = scratch[: alone.nbytes]
        for index in job.parts:
            codec.expand(index, parts[index], planes)
        if not job.checks:
            codec.recover(planes, block, alone)


assert CUT % SECTOR == 0
