"""Reads coded experts past the system's page cache and decodes them into the caller's memory, several at a time.

A :class:`DirectReader` receives the requests for all pieces of an expert together, so that it can join them. Each piece
that arrives may make jobs ready (:class:`DecodePlan`). A free thread takes the next job of the first expert in order,
so that all threads together decode the last expert of a layer. Parts can be kept in memory for later requests.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from expertcast.data.machine import run_alone, usable_processors
from expertcast.runtime.storage.codecs import Codec, Part
from expertcast.runtime.storage.expert_file import ExpertFile
from expertcast.runtime.storage.layout import SECTOR, sectors
from expertcast.runtime.storage.memory import HostMemory
from expertcast.runtime.storage.reader import DirectReader, OpenFile, Read
from expertcast.runtime.storage.transfer import Transfer, TransferQueue

# The plan of a codec: the pieces in which an expert is read, and the jobs that decode it.
#
# Byte i of a plain plane belongs to byte i of the compressed plane: a compressed shard can be decoded as soon as it and
# the same range of the plain planes have been read.

CUT = 1 << 20
"""Approximate bytes of a piece of a plain part, where a codec has compressed parts that can then be decoded sooner."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Range of one part that is read by one request."""

    part: int
    start: int = 0
    """First byte in the part, a multiple of a sector."""
    stop: int | None = None
    """End of the range, in bytes; None: the end of the part."""


@dataclass(frozen=True, slots=True)
class Job:
    """Unit of work of a decoding thread."""

    parts: tuple[int, ...]
    """Parts that the job checks and expands."""
    pieces: tuple[int, ...]
    """Pieces that must be read before the job can run."""
    shard: int | None = None
    """Compressed shard to recover; None: the whole block, or no part of it if `checks`."""
    checks: bool = False
    """Whether the job only verifies the digests of its parts."""


class DecodePlan:
    """Pieces and jobs of one expert; the same for all experts of a codec."""

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
        """In reading order, compressed parts first: then each piece of a plain part makes a job ready, and threads
        decode while the rest is read."""
        self.jobs: tuple[Job, ...] = tuple(jobs)
        self.scratch_bytes = max((codec.shards[index].nbytes for index in packed), default=0)
        """Bytes of scratch memory that a thread needs for a job."""

    def run(self, job: Job, parts: Sequence[Part], scratch: Tensor, block: Tensor) -> None:
        """Run one job of an expert.

        Args:
            job: a job whose pieces have all been read.
            parts: all parts of the expert; parts without a digest were verified before.
            scratch: uint8 [scratch_bytes], the thread's own memory for the compressed shard.
            block: uint8 [block_bytes]; the job writes its shard's share of it.

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


# Memory for coded parts, being read or kept. All of it is allocated at the start.
#
# An expert's parts are in two buffers of whole sectors: the *plain* one holds uncompressed planes (signs and
# mantissas), the *packed* one compressed planes (exponents). Either can be kept without the other.

PLAIN, PACKED = 0, 1
KINDS = (PLAIN, PACKED)
Kinds = frozenset[int]
NOTHING: Kinds = frozenset()
EVERYTHING: Kinds = frozenset(KINDS)


class PartPlaces:
    """Places of each expert's parts in its two buffers."""

    def __init__(self, file: ExpertFile, codec: Codec) -> None:
        packed_P = np.array([codec.planes[shard.plane].compressed for shard in codec.shards])
        whole_NP = -(-file.nbytes // SECTOR) * SECTOR
        self.kinds = [PACKED if packed else PLAIN for packed in packed_P.tolist()]
        """Kind of each part: `PLAIN` or `PACKED`."""
        self.nbytes = [0, 0]
        """Bytes of a buffer, by kind; 0 if the codec has no part of the kind."""
        self._starts_NP = np.zeros_like(whole_NP)
        for kind in KINDS:
            own = np.flatnonzero(packed_P == kind)
            ends = whole_NP[:, own].cumsum(axis=1)
            self._starts_NP[:, own] = ends - whole_NP[:, own]
            self.nbytes[kind] = int(ends[:, -1].max()) if len(own) else 0

    def starts(self, key: int) -> list[int]:
        """Return the first byte of each part of an expert in its buffer, a multiple of a sector."""
        starts: list[int] = self._starts_NP[key].tolist()
        return starts


class PartBuffers(NamedTuple):
    """Buffers of one expert that is being read or decoded."""

    buffers: list[Tensor | None]
    """By kind; None if the codec has no part of the kind."""
    held: Kinds
    """Kinds whose parts were already in memory, with verified digests."""


class PartMemory:
    """Allocates buffers to experts that are under way, and keeps parts for later requests. Callers must hold a lock.

    An expert is under way from :meth:`take` to :meth:`release`, while it is read and decoded.

    Args:
        nbytes: bytes of a buffer, by kind.
        under_way: maximum number of experts under way at a time, not counting kept parts.
        kept: maximum number of kept buffers, by kind.
    """

    def __init__(self, nbytes: list[int], *, under_way: int, kept: tuple[int, int] = (0, 0)) -> None:
        self._free_places = under_way
        """Number of experts that :meth:`take` can still admit. Free buffers reserved for kept parts do not count."""
        self._room = [count if size else 0 for count, size in zip(kept, nbytes, strict=True)]
        self._present = frozenset(kind for kind in KINDS if nbytes[kind])
        slabs = [
            HostMemory(sectors(size) * (count + under_way)).bytes if size else None
            for size, count in zip(nbytes, self._room, strict=True)
        ]
        self._free: list[list[Tensor]] = [
            [] if slab is None else list(slab.view(-1, sectors(size)).unbind(0))
            for slab, size in zip(slabs, nbytes, strict=True)
        ]
        self.nbytes = sum(slab.numel() for slab in slabs if slab is not None)
        """Bytes of all buffers."""
        self._kept: dict[int, dict[int, Tensor]] = {}
        """Kept buffers of each expert that is not under way, by kind."""
        self._count = [0, 0]
        """Number of buffers in `_kept`, by kind."""

    def held(self, key: int) -> Kinds:
        """Return the kinds of parts kept for an expert that is not under way."""
        return frozenset(self._kept.get(key, ()))

    def take(self, key: int, spare: int = 0) -> PartBuffers | None:
        """Admit an expert: return its kept buffers, and free buffers for the other kinds.

        Args:
            key: the expert.
            spare: number of experts that must still be admissible afterwards; if not, None is returned.
        """
        if self._free_places <= spare:
            return None
        self._free_places -= 1
        own = self._kept.pop(key, {})
        for kind in own:
            self._count[kind] -= 1
        buffers = [own.get(kind) for kind in KINDS]
        for kind in self._present - own.keys():
            buffers[kind] = self._free[kind].pop()
        return PartBuffers(buffers, frozenset(own))

    def release(self, key: int, taken: PartBuffers, keep: Container[int] = NOTHING) -> None:
        """Return the buffers of an expert that is no longer under way.

        Args:
            key: the expert.
            taken: the buffers that :meth:`take` returned.
            keep: kinds to keep while there is room; their parts must be complete.
        """
        self._free_places += 1
        for kind, buffer in enumerate(taken.buffers):
            if buffer is not None:
                self._keep_or_free(key, kind, buffer, kind in keep)

    def put(self, key: int, kind: int) -> Tensor | None:
        """Return a buffer that is kept from now on, for the caller to fill; None if there is no room or it is kept."""
        if self._count[kind] >= self._room[kind] or kind in self._kept.get(key, ()):
            return None
        buffer = self._free[kind].pop()
        self._keep_or_free(key, kind, buffer, True)
        return buffer

    def drop(self, key: int, keep: Container[int] = NOTHING) -> None:
        """Free an expert's kept buffers, except those of the kinds in `keep`."""
        own = self._kept.get(key)
        if own is None:
            return
        for kind in [kind for kind in own if kind not in keep]:
            self._count[kind] -= 1
            self._free[kind].append(own.pop(kind))
        if not own:
            del self._kept[key]

    def _keep_or_free(self, key: int, kind: int, buffer: Tensor, keep: bool) -> None:
        if keep and self._count[kind] < self._room[kind]:
            self._kept.setdefault(key, {})[kind] = buffer
            self._count[kind] += 1
        else:
            self._free[kind].append(buffer)


# The read of one coded expert.


@dataclass(eq=False, kw_only=True)
class CodedRead(Transfer):
    """Request that reads and decodes one expert into `target`."""

    target: Tensor
    """uint8 [block_bytes] in host memory."""
    taken: PartBuffers | None = None
    """Buffers of its parts, while it is under way."""
    parts: list[Part] = field(default_factory=list)
    """Parts, as views of these buffers."""
    reads: list[Read] = field(default_factory=list)
    """Requests of the disk."""
    reads_left: int = 0
    """Number of unfinished requests of the disk."""
    pieces_left: list[int] = field(default_factory=list)
    """Number of pieces that each job still waits for."""
    ready: deque[Job] = field(default_factory=deque)
    """Jobs that can run and that no thread has taken."""
    jobs_left: int = 0
    """Number of unfinished jobs, running ones included."""
    running: int = 0
    """Number of jobs that threads run now."""

    @property
    def bytes_read(self) -> int:
        """Bytes of the file that its requests read."""
        return sum(part.bytes_read for part in self.reads)

    @property
    def over(self) -> bool:
        """Whether all jobs are done, or it failed and no thread uses its memory any more."""
        return not self.running and not self.reads_left and (not self.jobs_left or self.error is not None)

    def fail(self, error: BaseException) -> None:
        """Record an error, unless there is one already, and discard the jobs that have not begun."""
        self.error = self.error or error
        self.ready.clear()


UNDER_WAY = 4
"""Maximum number of experts that are read or decoded at a time."""
SPARE = 2
"""Number of these places that forecasts leave free for urgent experts."""


def decoders_of(plan: DecodePlan) -> int:
    """Return the number of decoding threads: one per processor, at most one per job that can be ready."""
    return min(usable_processors(), UNDER_WAY * len(plan.jobs))


def decoding_bytes(codec: Codec) -> int:
    """Bytes of scratch memory of all decoding threads of a reader."""
    plan = DecodePlan(codec)
    return decoders_of(plan) * plan.scratch_bytes


class CodedReader(TransferQueue[CodedRead]):
    """Queue and threads that read and decode the experts of one file.

    Args:
        file: file of the experts.
        codec: codec that encoded them.
        threads: number of concurrent requests of the disk.
        pace: limit of the disk's rate in bytes per second; None: no limit.
        kept: maximum number of experts whose plain parts, and of those whose packed parts, are kept in memory.
        wanted: returns the kinds of parts to keep of an expert that has just been decoded.

    Raises:
        ExpertcastError: the file cannot be opened.
    """

    def __init__(
        self, file: ExpertFile, codec: Codec, *, threads: int, pace: float | None = None,
        kept: tuple[int, int] = (0, 0), wanted: Callable[[int], Kinds] = lambda _key: NOTHING,
    ) -> None:  # fmt: skip
        super().__init__()
        self._file, self._codec, self._wanted = file, codec, wanted
        self._places, self._plan = PartPlaces(file, codec), DecodePlan(codec)
        scratch = [
            torch.empty(self._plan.scratch_bytes, dtype=torch.uint8) for _ in range(decoders_of(self._plan))
        ]  # allocated before any thread starts, since it may fail
        self._disk = DirectReader(OpenFile(file.path, file.handle), threads=threads, pace=pace)
        self._jobs_of = [
            [number for number, job in enumerate(self._plan.jobs) if piece in job.pieces]
            for piece in range(len(self._plan.pieces))
        ]
        self._memory = PartMemory(self._places.nbytes, under_way=UNDER_WAY, kept=kept)
        self._under_way: list[CodedRead] = []
        """Experts that have begun, in that order."""
        self.defer_forecasts = False
        """Whether to decode forecasts only while a thread waits for an expert, or on processors that torch leaves free.
        Set when the model computes on the CPU: decoding beside it would slow it down more than it saves."""
        self._processors, self._team, self._awaited = usable_processors(), 1, 0
        """Number of usable processors, of threads that the model computes with, and of threads that wait for an expert
        and so leave a processor idle."""
        self._decoders = [
            threading.Thread(target=self._run, args=(own,), name=f"expertcast-decode-{number}", daemon=True)
            for number, own in enumerate(scratch)
        ]
        for decoder in self._decoders:
            decoder.start()

    def submit(self, read: CodedRead, *, front: bool = False) -> None:
        with self.lock:
            self._team = torch.get_num_threads()
            super().submit(read, front=front)
            self._begin()

    def promote(self, read: CodedRead) -> None:
        """Move a read, with its remaining requests and jobs, before all forecasts."""
        with self.lock:
            super().promote(read)
            read.urgent = True
            for part in read.reads:
                self._disk.promote(part)
            self.changed.notify_all()

    def wait(self, read: CodedRead) -> None:
        """Block until an expert has been read and decoded. Deferred forecasts may be decoded meanwhile."""
        with self.lock:
            self._awaited += 1
            self.changed.notify_all()
        try:
            read.wait()
        finally:
            with self.lock:
                self._awaited -= 1

    def held(self, key: int) -> Kinds:
        """Return the kinds of parts kept for an expert that is not under way."""
        with self.lock:
            return self._memory.held(key)

    def drop(self, key: int, keep: Kinds = NOTHING) -> None:
        """Free an expert's kept parts, except the kinds in `keep`. `wanted` decides for an expert under way."""
        with self.lock:
            self._memory.drop(key, keep)

    def keep_plain(self, key: int, block: Tensor) -> None:
        """Copy the plain parts from the block of an expert that is not under way and keep them, if there is room."""
        with self.lock:
            buffer = self._memory.put(key, PLAIN)
        if buffer is not None:
            (plain,) = (shard for shard in self._codec.shards if not self._codec.planes[shard.plane].compressed)
            self._codec.take_plain(block, buffer[: plain.nbytes])

    def close(self) -> None:
        """Empty the queue, and wait for requests and jobs that have begun."""
        super().close()
        self._disk.close()
        for decoder in self._decoders:
            decoder.join()

    def _begin(self) -> None:
        """Begin the first reads of the queue while there is memory for their parts."""
        while (read := self.first()) is not None:
            taken = self._memory.take(read.key, 0 if read.urgent else SPARE)
            if taken is None:
                return
            read.begin()
            read.start = time.perf_counter()
            self._under_way.append(read)
            self._request_pieces(read, taken)

    def _request_pieces(self, read: CodedRead, taken: PartBuffers) -> None:
        """Request the pieces that are not in memory. Jobs that need none of these are ready now."""
        read.taken = taken
        file, key, plan = self._file, read.key, self._plan
        offsets, sizes, digests = file.offsets[key].tolist(), file.nbytes[key].tolist(), file.digests[key].tolist()
        kinds, areas = self._places.kinds, []
        for kind, start, nbytes, digest in zip(kinds, self._places.starts(key), sizes, digests, strict=True):
            buffer = taken.buffers[kind]
            assert buffer is not None
            areas.append(buffer[start : start + sectors(nbytes)])
            read.parts.append(Part(areas[-1][:nbytes], None if kind in taken.held else digest))
        absent = [number for number, piece in enumerate(plan.pieces) if kinds[piece.part] not in taken.held]
        read.pieces_left = [len(set(job.pieces).intersection(absent)) for job in plan.jobs]
        read.jobs_left, read.reads_left = len(plan.jobs), len(absent)
        for number in absent:
            piece = plan.pieces[number]
            target = areas[piece.part][piece.start : piece.stop]
            offset = offsets[piece.part] + piece.start
            then = partial(self._piece_arrived, read, number)
            read.reads.append(Read(urgent=read.urgent, target=target, offset=offset, then=then))
        read.ready.extend(job for job, left in zip(plan.jobs, read.pieces_left, strict=True) if not left)
        self.changed.notify_all()
        for part in read.reads:
            self._disk.submit(part)

    def _piece_arrived(self, read: CodedRead, number: int, part: Read) -> None:
        """Handle a finished request of the disk: make the jobs ready that needed only this piece."""
        with self.lock:
            read.reads_left -= 1
            if part.error is not None:
                read.fail(part.error)
            for index in self._jobs_of[number]:
                read.pieces_left[index] -= 1
                if not read.pieces_left[index] and read.error is None:
                    read.ready.append(self._plan.jobs[index])
                    self.changed.notify()
            over = read.over
        if over:
            self._finish(read)

    def _next(self) -> tuple[CodedRead, Job] | None:
        """Wait for the next job, urgent experts first; None if the reader is closed."""
        with self.lock:
            while not self._closed:
                ready = [read for read in self._under_way if read.ready]
                read = min(ready, key=lambda read: not read.urgent, default=None)
                if read is not None and (read.urgent or self._may_decode_forecast()):
                    read.running += 1
                    return read, read.ready.popleft()
                self.changed.wait()
        return None

    def _may_decode_forecast(self) -> bool:
        """Whether a thread may decode a forecast's expert now; see `defer_forecasts`."""
        early = sum(read.running for read in self._under_way if not read.urgent)
        return not self.defer_forecasts or self._awaited > 0 or early < self._processors - self._team

    def _run(self, scratch: Tensor) -> None:
        run_alone()
        while (following := self._next()) is not None:
            read, job = following
            error = None
            try:
                self._plan.run(job, read.parts, scratch, read.target)
            except BaseException as caught:  # raised in the threads that wait for the expert
                error = caught
            with self.lock:
                read.running -= 1
                read.jobs_left -= 1
                if error is not None:
                    read.fail(error)
                over = read.over
            if over:
                self._finish(read)

    def _finish(self, read: CodedRead) -> None:
        error: BaseException | None = None
        try:
            with self.lock:  # a later change of `wanted` is followed by `drop`, which needs this lock
                assert read.taken is not None
                taken, read.taken, keep = read.taken, None, NOTHING
                read.parts.clear()
                self._under_way.remove(read)
                try:
                    if read.error is None:
                        keep = self._wanted(read.key)
                finally:
                    self._memory.release(read.key, taken, keep)
                    self._begin()
        except BaseException as raised:  # raised in the threads that wait for the expert
            error = raised
        finally:
            read.finish(time.perf_counter(), error)
