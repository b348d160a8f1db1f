"""Reads coded experts past the system's page cache and decodes them into the caller's memory, several at a time.

A :class:`DirectReader` gets the requests for all pieces of an expert together, so that it can join them. Each piece
that has been read may make jobs ready (:class:`DecodePlan`), and a free thread takes the next job of the expert that
comes first: the last expert of a layer is decoded by all threads at once. Parts may be kept for the next time.
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

from expertcast.data.machine import usable_processors
from expertcast.runtime.storage.codecs import Codec, Part
from expertcast.runtime.storage.expert_file import ExpertFile
from expertcast.runtime.storage.memory import HostMemory
from expertcast.runtime.storage.reader import SECTOR, DirectReader, Read, sectors
from expertcast.runtime.storage.transfer import Transfer, TransferQueue

# The plan of a codec: the pieces in which an expert is read, and the jobs that decode it.
#
# Plain planes lie under a compressed plane byte by byte: a compressed shard can be decoded as soon as it and the bytes
# under it have been read.

CUT = 1 << 20
"""Bytes, about: plain parts are read in such pieces where something can be decoded sooner for it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of one part that are one request."""

    part: int
    start: int = 0
    """Byte of the part, a multiple of a sector."""
    stop: int | None = None
    """None: its end."""


@dataclass(frozen=True, slots=True)
class Job:
    """Unit of work of a decoding thread."""

    parts: tuple[int, ...]
    """Parts that the job checks and expands."""
    pieces: tuple[int, ...]
    """Pieces that the job needs."""
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
        """Bytes of memory that a thread needs for a job."""

    def run(self, job: Job, parts: Sequence[Part], scratch: Tensor, block: Tensor) -> None:
        """Do one job of an expert.

        Args:
            job: all of its pieces have come.
            parts: of the expert, where they were read; parts without a digest have been compared.
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


# Memory for coded parts, under way or kept. All of it is allocated at the start.
#
# An expert's parts lie in two buffers of whole sectors: the *plain* one holds planes that are not compressed (signs and
# mantissas), the *packed* one compressed planes (exponents). Either can be kept alone.

PLAIN, PACKED = 0, 1
KINDS = (PLAIN, PACKED)
Kinds = frozenset[int]
NOTHING: Kinds = frozenset()
EVERYTHING: Kinds = frozenset(KINDS)


class PartPlaces:
    """Where the parts of each expert of a file lie in its buffers."""

    def __init__(self, file: ExpertFile, codec: Codec) -> None:
        packed_P = np.array([codec.planes[shard.plane].compressed for shard in codec.shards])
        whole_NP = -(-file.nbytes // SECTOR) * SECTOR
        self.kinds = [PACKED if packed else PLAIN for packed in packed_P.tolist()]
        """Kind of each part."""
        self.nbytes = [0, 0]
        """Bytes of a buffer of each kind; 0 if there are no such parts."""
        self._starts_NP = np.zeros_like(whole_NP)
        for kind in KINDS:
            own = np.flatnonzero(packed_P == kind)
            ends = whole_NP[:, own].cumsum(axis=1)
            self._starts_NP[:, own] = ends - whole_NP[:, own]
            self.nbytes[kind] = int(ends[:, -1].max()) if len(own) else 0

    def starts(self, key: int) -> list[int]:
        """Byte of its buffer at which each part begins, a multiple of a sector."""
        starts: list[int] = self._starts_NP[key].tolist()
        return starts


class Taken(NamedTuple):
    """The buffers of one expert that is under way."""

    buffers: list[Tensor | None]
    """By kind."""
    held: Kinds
    """Kinds whose parts were there already, and have been compared with their digests."""


class PartMemory:
    """Buffers, and whose parts are in them. Whoever uses it holds a lock.

    Args:
        nbytes: of a buffer, by kind.
        under_way: experts that may be under way at a time, beside those that are kept.
        kept: most buffers of each kind that are kept.
    """

    def __init__(self, nbytes: list[int], *, under_way: int, kept: tuple[int, int] = (0, 0)) -> None:
        self._may_begin = under_way
        """Experts that may still get under way. Buffers that nothing is kept in so far are not for them."""
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
        """Buffers of each expert that is kept and not under way, by kind."""
        self._count = [0, 0]
        """Buffers that are kept, those under way left out."""

    def held(self, key: int) -> Kinds:
        """Return the kinds of parts that are kept of an expert that is not under way."""
        return frozenset(self._kept.get(key, ()))

    def take(self, key: int, spare: int = 0) -> Taken | None:
        """An expert gets under way: its own buffers, and free ones for what is not there.

        Args:
            key: the expert.
            spare: experts that must still be able to get under way afterwards; None is returned otherwise.
        """
        if self._may_begin <= spare:
            return None
        self._may_begin -= 1
        own = self._kept.pop(key, {})
        for kind in own:
            self._count[kind] -= 1
        buffers = [own.get(kind) for kind in KINDS]
        for kind in self._present - own.keys():
            buffers[kind] = self._free[kind].pop()
        return Taken(buffers, frozenset(own))

    def give(self, key: int, taken: Taken, keep: Container[int] = NOTHING) -> None:
        """It is under way no more.

        Args:
            key: the expert.
            taken: what :meth:`take` gave.
            keep: kinds whose parts are whole, and to be kept where there is room.
        """
        self._may_begin += 1
        for kind, buffer in enumerate(taken.buffers):
            if buffer is not None:
                self._settle(key, kind, buffer, kind in keep)

    def put(self, key: int, kind: int) -> Tensor | None:
        """A buffer for parts that come from elsewhere and count as kept from now on; None: there is no room."""
        if self._count[kind] >= self._room[kind] or kind in self._kept.get(key, ()):
            return None
        buffer = self._free[kind].pop()
        self._settle(key, kind, buffer, True)
        return buffer

    def drop(self, key: int, keep: Container[int] = NOTHING) -> None:
        """Free what is kept of an expert, but for some kinds."""
        own = self._kept.get(key)
        if own is None:
            return
        for kind in [kind for kind in own if kind not in keep]:
            self._count[kind] -= 1
            self._free[kind].append(own.pop(kind))
        if not own:
            del self._kept[key]

    def _settle(self, key: int, kind: int, buffer: Tensor, keep: bool) -> None:
        if keep and self._count[kind] < self._room[kind]:
            self._kept.setdefault(key, {})[kind] = buffer
            self._count[kind] += 1
        else:
            self._free[kind].append(buffer)


# The read of one coded expert.


@dataclass(slots=True, eq=False, kw_only=True)
class CodedRead(Transfer):
    """One expert, into its block."""

    target: Tensor
    """uint8 [block_bytes] in host memory."""
    taken: Taken | None = None
    """While it is under way, the memory of its parts."""
    parts: list[Part] = field(default_factory=list)
    """Memory of the parts."""
    reads: list[Read] = field(default_factory=list)
    """Requests of the disk."""
    reading: int = 0
    """Number of these that are not done."""
    needs: list[int] = field(default_factory=list)
    """Pieces that have not come, of each job."""
    ready: deque[Job] = field(default_factory=deque)
    """Jobs whose pieces have come and that no thread has taken."""
    undone: int = 0
    """Jobs that are not done."""
    running: int = 0
    """Jobs that a thread does now."""

    @property
    def bytes_read(self) -> int:
        """Bytes of the file that were read for it."""
        return sum(part.bytes_read for part in self.reads)

    @property
    def over(self) -> bool:
        """Whether nothing more happens: all is done, or something failed and nothing touches its memory any more."""
        return not self.running and not self.reading and (not self.undone or self.error is not None)

    def fail(self, error: BaseException) -> None:
        """No more is done for it."""
        self.error = self.error or error
        self.ready.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bytes per second."""

    disk: float
    """Bytes of the file, while anything is read."""
    decoding: float
    """Bytes of experts' blocks, by one thread."""
    threads: int
    """Decoding threads."""


UNDER_WAY = 4
"""Experts that are read or decoded at a time."""
SPARE = 2
"""Places among these that stay free for urgent experts when a forecast's begins."""
_COMMON_DISK, _COMMON_DECODING = 1e9, 1e9


def decoders_of(plan: DecodePlan) -> int:
    """Threads that can be busy decoding at a time."""
    return min(usable_processors(), UNDER_WAY * len(plan.jobs))


def decoding_bytes(codec: Codec) -> int:
    """Memory in which the threads of a reader decode."""
    plan = DecodePlan(codec)
    return decoders_of(plan) * plan.scratch_bytes


class CodedReader(TransferQueue[CodedRead]):
    """Threads that read and decode experts of one file.

    Args:
        file: where they lie.
        codec: that made them.
        threads: requests of the disk under way at a time.
        pace: bytes per second that the disk is taken for, at most; None: as it is.
        kept: experts whose plain, and whose packed parts may be kept in memory.
        wanted: of an expert that has just been decoded, which of its parts are to be kept.

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
        ]  # before any thread could lack it
        self._disk = DirectReader(file.path, threads=threads, pace=pace, handle=file.handle)
        self._jobs_of = [
            [number for number, job in enumerate(self._plan.jobs) if piece in job.pieces]
            for piece in range(len(self._plan.pieces))
        ]
        self._memory = PartMemory(self._places.nbytes, under_way=UNDER_WAY, kept=kept)
        self._under_way: list[CodedRead] = []
        """Experts that have begun, in that order."""
        self.held_back = False
        """Whether the model computes on these processors: forecasts are decoded while a thread waits, at other times
        only by processors that torch leaves free. To decode beside the model costs it more than it saves."""
        self._processors, self._awaited = usable_processors(), 0
        """Threads that wait for an expert compute nothing meanwhile."""
        self._decoded, self._decoding_s = 0.0, 0.0
        """Bytes of blocks, and the seconds of threads that they took."""
        self._decoders = [
            threading.Thread(target=self._run, args=(own,), name=f"expertcast-decode-{number}", daemon=True)
            for number, own in enumerate(scratch)
        ]
        for decoder in self._decoders:
            decoder.start()

    @property
    def nbytes(self) -> int:
        """Bytes of the memory for parts, under way and kept."""
        return self._memory.nbytes

    def submit(self, read: CodedRead, *, front: bool = False) -> None:
        with self.lock:
            super().submit(read, front=front)
            self._begin()

    def promote(self, read: CodedRead) -> None:
        """Move a read, or the rest of its requests and jobs, before all forecasts."""
        with self.lock:
            super().promote(read)
            read.urgent = True
            for part in read.reads:
                self._disk.promote(part)
            self.changed.notify_all()

    def wait(self, read: CodedRead) -> None:
        """Return when an expert has come; the thread that asks computes nothing meanwhile."""
        with self.lock:
            self._awaited += 1
            self.changed.notify_all()
        try:
            read.wait()
        finally:
            with self.lock:
                self._awaited -= 1

    def held(self, key: int) -> Kinds:
        """Return the kinds of parts in memory of an expert that is not under way."""
        with self.lock:
            return self._memory.held(key)

    def drop(self, key: int, keep: Kinds = NOTHING) -> None:
        """Forget the kept parts of an expert, but for some kinds; `wanted` decides about an expert under way."""
        with self.lock:
            self._memory.drop(key, keep)

    def keep_plain(self, key: int, block: Tensor) -> None:
        """Keep the plain parts of an expert that is not under way, taken from its block, if there is room."""
        with self.lock:
            buffer = self._memory.put(key, PLAIN)
        if buffer is not None:
            (plain,) = (shard for shard in self._codec.shards if not self._codec.planes[shard.plane].compressed)
            self._codec.take_plain(block, buffer[: plain.nbytes])

    def rates(self) -> Rates:
        """Return the rates measured so far, else common ones."""
        came = self._disk.bytes_read
        return Rates(
            disk=came / self._disk.busy_s if came else _COMMON_DISK,
            decoding=self._decoded / self._decoding_s if self._decoded else _COMMON_DECODING,
            threads=len(self._decoders),
        )

    def close(self) -> None:
        """Drop what is queued, and return when nothing is being read or decoded."""
        super().close()
        self._disk.close()
        for decoder in self._decoders:
            decoder.join()

    def _begin(self) -> None:
        """Begin what there is memory for."""
        while (read := self.first()) is not None:
            taken = self._memory.take(read.key, 0 if read.urgent else SPARE)
            if taken is None:
                return
            read.begin()
            read.start = time.perf_counter()
            self._under_way.append(read)
            self._ask(read, taken)

    def _ask(self, read: CodedRead, taken: Taken) -> None:
        """Request the pieces that are not in memory; jobs that need none are ready at once."""
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
        read.needs = [len(set(job.pieces).intersection(absent)) for job in plan.jobs]
        read.undone, read.reading = len(plan.jobs), len(absent)
        for number in absent:
            piece = plan.pieces[number]
            target = areas[piece.part][piece.start : piece.stop]
            offset = offsets[piece.part] + piece.start
            then = partial(self._come, read, number)
            read.reads.append(Read(urgent=read.urgent, target=target, offset=offset, then=then))
        read.ready.extend(job for job, left in zip(plan.jobs, read.needs, strict=True) if not left)
        self.changed.notify_all()
        for part in read.reads:
            self._disk.submit(part)

    def _come(self, read: CodedRead, number: int, part: Read) -> None:
        """A thread of the disk has read a piece."""
        with self.lock:
            read.reading -= 1
            if part.error is not None:
                read.fail(part.error)
            for index in self._jobs_of[number]:
                read.needs[index] -= 1
                if not read.needs[index] and read.error is None:
                    read.ready.append(self._plan.jobs[index])
                    self.changed.notify()
            over = read.over
        if over:
            self._finish(read)

    def _next(self) -> tuple[CodedRead, Job] | None:
        """The next job, of urgent experts first; None: no more come."""
        with self.lock:
            while not self._closed:
                ready = [read for read in self._under_way if read.ready]
                read = min(ready, key=lambda read: not read.urgent, default=None)
                if read is not None and (read.urgent or self._may_be_early()):
                    read.running += 1
                    return read, read.ready.popleft()
                self.changed.wait()
        return None

    def _may_be_early(self) -> bool:
        """Whether a thread may decode a forecast's expert now."""
        early = sum(read.running for read in self._under_way if not read.urgent)
        free = self._processors - torch.get_num_threads()
        return not self.held_back or self._awaited > 0 or early < free

    def _run(self, scratch: Tensor) -> None:
        while (following := self._next()) is not None:
            read, job = following
            error, start = None, time.perf_counter()
            try:
                self._plan.run(job, read.parts, scratch, read.target)
            except BaseException as caught:  # handed to whoever waits for it
                error = caught
            with self.lock:
                read.running -= 1
                read.undone -= 1
                if error is None:
                    self._decoding_s += time.perf_counter() - start  # first: other threads read the rates meanwhile
                    self._decoded += read.target.numel() / len(self._plan.jobs)
                else:
                    read.fail(error)
                over = read.over
            if over:
                self._finish(read)

    def _finish(self, read: CodedRead) -> None:
        error: BaseException | None = None
        try:
            with self.lock:  # whoever wants something else from now on drops it after this
                assert read.taken is not None
                taken, read.taken, keep = read.taken, None, NOTHING
                read.parts.clear()
                self._under_way.remove(read)
                try:
                    if read.error is None:
                        keep = self._wanted(read.key)
                finally:
                    self._memory.give(read.key, taken, keep)
                    self._begin()
        except BaseException as raised:  # handed to whoever waits for it
            error = raised
        finally:
            read.finish(time.perf_counter(), error)
