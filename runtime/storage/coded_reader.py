"""Reads coded experts past the system's page cache and decodes them into the caller's memory, several at a time.

The pieces of an expert are asked of a :class:`DirectReader` together, so that it can join them. Each that has come may
make jobs ready (:mod:`expertcast.runtime.storage.decode_plan`), and a free thread takes the next job of the expert that
comes first: the last expert of a layer is decoded by all threads at once. Parts may be kept for the next time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from expertcast.data.memory import usable_processors
from expertcast.runtime.storage.codecs import Codec, Part
from expertcast.runtime.storage.coded_file import CodedFile
from expertcast.runtime.storage.coded_read import CodedRead, Rates
from expertcast.runtime.storage.decode_plan import DecodePlan
from expertcast.runtime.storage.direct_read import Read, sectors
from expertcast.runtime.storage.direct_reader import DirectReader
from expertcast.runtime.storage.part_memory import NOTHING, PLAIN, Kinds, PartMemory, PartPlaces, Taken
from expertcast.runtime.storage.read_queue import ReadQueue
from expertcast.runtime.storage.ready_jobs import ReadyJobs

UNDER_WAY = 4
"""Experts that are read or decoded at a time."""
SPARE = 2
"""Of these, how many are left for urgent ones when a forecast's begins."""
_COMMON_DISK, _COMMON_DECODING = 1e9, 1e9


def decoders_of(plan: DecodePlan) -> int:
    """Threads that can be busy decoding at a time."""
    return min(usable_processors(), UNDER_WAY * len(plan.jobs))


def decoding_bytes(codec: Codec) -> int:
    """Memory in which the threads of a reader decode."""
    plan = DecodePlan(codec)
    return decoders_of(plan) * plan.scratch_bytes


class CodedReader:
    """Threads that read and decode experts of one file.

    Args:
        file: where they lie.
        codec: that made them.
        threads: requests of the disk under way at a time.
        pace: bytes per second that the disk is taken for, at most; None: as it is.
        decoders: threads that decode; None: as many as can be busy, for the model waits while they work.
        kept: experts whose plain, and whose packed parts may be kept in memory.
        wanted: of an expert that has just been decoded, which of its parts are to be kept.

    Raises:
        ExpertcastError: the file cannot be opened.
    """

    def __init__(
        self, file: CodedFile, codec: Codec, *, threads: int, pace: float | None = None, decoders: int | None = None,
        kept: tuple[int, int] = (0, 0), wanted: Callable[[int], Kinds] = lambda _key: NOTHING,
    ) -> None:  # fmt: skip
        self._file, self._codec, self._wanted = file, codec, wanted
        self._places, self._plan = PartPlaces(file, codec), DecodePlan(codec)
        scratch = [
            torch.empty(self._plan.scratch_bytes, dtype=torch.uint8) for _ in range(decoders or decoders_of(self._plan))
        ]  # before any thread could lack it
        self._disk = DirectReader(file.path, threads=threads, pace=pace, handle=file.handle)
        self._jobs_of = [
            [number for number, job in enumerate(self._plan.jobs) if piece in job.pieces]
            for piece in range(len(self._plan.pieces))
        ]
        self._memory = PartMemory(self._places.nbytes, under_way=UNDER_WAY, kept=kept)
        self._waiting = ReadQueue[CodedRead](lambda read: not read.begun)
        self._changed = threading.Condition()
        self.jobs = ReadyJobs(self._changed)
        self._closed = False
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
        """Of the memory for parts, under way and kept."""
        return self._memory.nbytes

    def submit(self, read: CodedRead) -> None:
        """Queue an expert, behind those that are as urgent."""
        read.expect()
        with self._changed:
            self._waiting.push(read)
            self._begin()

    def promote(self, read: CodedRead) -> None:
        """It comes before all forecasts; of one that has been begun, what the disk and the threads have not."""
        with self._changed:
            if read.urgent:
                return
            read.urgent = True
            if not read.begun:
                self._waiting.push(read)
                self._begin()
            self.jobs.promote(read)
            for part in read.reads:
                self._disk.promote(part)

    def cancel(self, read: CodedRead) -> bool:
        """Drop an expert that has not been begun. True if nothing of it was or will be read."""
        with self._changed:
            read.cancelled = not read.begun
            return read.cancelled

    def wait(self, read: CodedRead) -> None:
        """Return when all of an expert has come; the thread that asks computes nothing meanwhile.

        Raises:
            ExpertcastError: it could not be read.
        """
        with self._changed:
            self.jobs.awaited += 1
            self._changed.notify_all()
        try:
            read.wait()
        finally:
            with self._changed:
                self.jobs.awaited -= 1

    def held(self, key: int) -> Kinds:
        """Which parts of an expert that is not under way are in memory."""
        with self._changed:
            return self._memory.held(key)

    def drop(self, key: int, keep: Kinds = NOTHING) -> None:
        """Forget the kept parts of an expert, but for some kinds; of one under way `wanted` says it at its end."""
        with self._changed:
            self._memory.drop(key, keep)

    def keep_plain(self, key: int, block: Tensor) -> None:
        """Keep the plain parts of an expert that is not under way, taken from its block, if there is room."""
        with self._changed:
            buffer = self._memory.put(key, PLAIN)
        if buffer is not None:
            (plain,) = (shard for shard in self._codec.shards if not self._codec.planes[shard.plane].compressed)
            self._codec.take_plain(block, buffer[: plain.nbytes])

    def rates(self) -> Rates:
        """What was measured so far, else what is common."""
        came = self._disk.bytes_read
        return Rates(
            disk=came / self._disk.busy_s if came else _COMMON_DISK,
            decoding=self._decoded / self._decoding_s if self._decoded else _COMMON_DECODING,
            threads=len(self._decoders),
        )

    def close(self) -> None:
        """Drop what is queued, and return when nothing is being read or decoded."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self.jobs.close()
        self._disk.close()
        for decoder in self._decoders:
            decoder.join()

    def _begin(self) -> None:
        """Begin what there is memory for."""
        while not self._closed and (read := self._waiting.first()) is not None:
            read.taken = self._memory.take(read.key, 0 if read.urgent else SPARE)
            if read.taken is None:
                return
            read.begun, read.start = 1, time.perf_counter()
            self._ask(read, read.taken)

    def _ask(self, read: CodedRead, taken: Taken) -> None:
        """Ask for the pieces that are not in memory; jobs that need none are ready at once."""
        file, key, plan = self._file, read.key, self._plan
        offsets, sizes, digests = file.offsets[key].tolist(), file.nbytes[key].tolist(), file.digests[key].tolist()
        places, areas = self._places.of(key), []
        for place, nbytes, digest in zip(places, sizes, digests, strict=True):
            buffer = taken.buffers[place.kind]
            assert buffer is not None
            areas.append(buffer[place.start : place.start + sectors(nbytes)])
            read.parts.append(Part(areas[-1][:nbytes], None if place.kind in taken.held else digest))
        absent = [number for number, piece in enumerate(plan.pieces) if places[piece.part].kind not in taken.held]
        read.needs = [len(set(job.pieces).intersection(absent)) for job in plan.jobs]
        read.undone, read.reading = len(plan.jobs), len(absent)
        for number in absent:
            piece = plan.pieces[number]
            target = areas[piece.part][piece.start : piece.stop]
            offset = offsets[piece.part] + piece.start
            read.reads.append(Read(target, self._come(read, number), read.urgent, offset=offset))
        for job, left in zip(plan.jobs, read.needs, strict=True):
            if not left:
                self.jobs.add(read, job)
        for part in read.reads:
            self._disk.submit(part)

    def _come(self, read: CodedRead, number: int) -> Callable[[Read], None]:
        """What a thread of the disk does when it has read a piece."""

        def arrived(part: Read) -> None:
            with self._changed:
                read.reading -= 1
                if part.error is not None:
                    read.fail(part.error)
                for index in self._jobs_of[number]:
                    read.needs[index] -= 1
                    if not read.needs[index] and read.error is None:
                        self.jobs.add(read, self._plan.jobs[index])
                over = read.over
            if over:
                self._finish(read)

        return arrived

    def _run(self, scratch: Tensor) -> None:
        while (taken := self.jobs.take()) is not None:
            read, job, early = taken
            error, start = None, time.perf_counter()
            try:
                self._plan.run(job, read.parts, scratch, read.target)
            except BaseException as caught:  # handed to whoever waits for it
                error = caught
            with self._changed:
                read.running -= 1
                read.undone -= 1
                self.jobs.done(early)
                if error is None:
                    self._decoding_s += time.perf_counter() - start  # first: rates are asked for meanwhile
                    self._decoded += read.nbytes / len(self._plan.jobs)
                else:
                    read.fail(error)
                over = read.over
            if over:
                self._finish(read)

    def _finish(self, read: CodedRead) -> None:
        try:
            with self._changed:  # whoever wants something else from now on drops it after this
                assert read.taken is not None
                taken, read.taken, keep = read.taken, None, NOTHING
                read.parts.clear()
                try:
                    if read.error is None:
                        keep = self._wanted(read.key)
                finally:
                    self._memory.give(read.key, taken, keep)
                    self._begin()
        except BaseException as error:  # handed to whoever waits for it
            read.error = read.error or error
        finally:
            read.arrive(time.perf_counter())
