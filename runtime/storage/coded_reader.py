"""Reads experts of a coded store: parts from the disk, into planes, into a block.

Each worker has one expert under way, in memory of its own; while it waits for the disk others decode. So the disk has
requests as long as anything is asked for, and memory does not grow with what is asked for.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
from dataclasses import dataclass

from torch import Tensor

from expertcast.runtime.storage.arrival import Arrival
from expertcast.runtime.storage.codecs import Codec, Part
from expertcast.runtime.storage.coded_file import CodedFile
from expertcast.runtime.storage.direct_read import Read, sectors
from expertcast.runtime.storage.direct_reader import DirectReader
from expertcast.runtime.storage.host_memory import HostMemory

_AHEAD = 2
"""Experts that are being read for each thread that decodes."""


@dataclass(slots=True, eq=False, kw_only=True)
class CodedRead(Arrival):
    """One expert; the target is its block, uint8 [block_bytes]."""

    key: int
    parts: list[Read] | None = None
    """Once begun, what is read for it."""


class CodedReader:
    """Workers that read and decode experts of one file.

    Args:
        file: where they lie.
        codec: that made them.
        threads: requests of the disk under way at a time.
        pace: bytes per second that the disk is taken for, at most; None: as it is.
        decoders: experts that are decoded at a time; None: half of the processors, for the model computes too.

    Raises:
        ExpertcastError: the file cannot be opened.
    """

    def __init__(
        self, file: CodedFile, codec: Codec, *, threads: int, pace: float | None = None, decoders: int | None = None
    ) -> None:
        self._file, self._codec = file, codec
        self._disk = DirectReader(file.path, threads=threads, pace=pace, handle=file.handle)
        decoders = decoders or max(1, (os.cpu_count() or 1) // 2)
        self._decoding = threading.BoundedSemaphore(decoders)
        self._queue: list[tuple[int, int, CodedRead]] = []
        self._order = 0
        self._changed = threading.Condition()
        self._closed = False
        self._room = max(map(file.span, range(file.header.count)))
        self._workers = [
            threading.Thread(target=self._run, name=f"expertcast-decode-{number}", daemon=True)
            for number in range(_AHEAD + decoders)
        ]
        for worker in self._workers:
            worker.start()

    def submit(self, read: CodedRead) -> None:
        """Queue an expert, behind those that are as urgent."""
        read.expect()
        with self._changed:
            self._push(read)
            self._changed.notify()

    def promote(self, read: CodedRead) -> None:
        """It comes before all forecasts; of one that has been begun, what the disk has not."""
        with self._changed:
            if read.urgent:
                return
            read.urgent = True
            if not read.begun:
                self._push(read)  # the old entry has another rank, and is skipped
            parts = read.parts or []
        for part in parts:
            self._disk.promote(part)

    def cancel(self, read: CodedRead) -> bool:
        """Drop an expert that no worker has begun. True if nothing of it was or will be read."""
        with self._changed:
            read.cancelled = not read.begun
            return read.cancelled

    def close(self) -> None:
        """Drop what is queued, and return when nothing is being read or decoded."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()
        for worker in self._workers:
            worker.join()
        self._disk.close()

    def _push(self, read: CodedRead) -> None:
        self._order += 1
        heapq.heappush(self._queue, (read.rank, self._order, read))

    def _take(self) -> CodedRead | None:
        with self._changed:
            while True:
                while self._queue:
                    rank, _, read = heapq.heappop(self._queue)
                    if rank == read.rank and not read.cancelled and not read.begun:
                        read.begun = 1
                        return read
                if self._closed:
                    return None
                self._changed.wait()

    def _run(self) -> None:
        memory = HostMemory(self._room).bytes
        planes: list[Tensor] | None = None
        while (read := self._take()) is not None:
            read.start = time.perf_counter()
            if planes is None or len(self._codec.planes) == 1:  # a plane may be the block itself
                planes = self._codec.new_planes(read.target)
            try:
                self._decode(read, memory, list(planes))
            except BaseException as error:  # handed to whoever waits for it
                read.error = error
            read.arrive(time.perf_counter())

    def _decode(self, read: CodedRead, memory: Tensor, planes: list[Tensor]) -> None:
        parts = self._ask(read, memory)
        try:
            for index, (part, digest) in enumerate(zip(parts, self._file.digests[read.key].tolist(), strict=True)):
                part.wait()
                data = Part(part.target[: int(self._file.nbytes[read.key, index])], digest)
                plane = self._codec.shards[index].plane
                if not self._codec.planes[plane].compressed:
                    planes[plane] = data.data  # is the plane where it lies
                with self._decoding:
                    self._codec.expand(index, data, planes)
            with self._decoding:
                self._codec.recover(planes, read.target)
        finally:
            for part in parts:
                part.settle()  # or they would be read into the next expert's memory

    def _ask(self, read: CodedRead, memory: Tensor) -> list[Read]:
        """Ask for all parts of an expert: neighbours in the file, and in memory."""
        offsets, asked = self._file.offsets[read.key].tolist(), []
        with self._changed:  # whoever promotes it finds all of its parts asked for, or none
            for offset, nbytes in zip(offsets, self._file.nbytes[read.key].tolist(), strict=True):
                start = offset - offsets[0]
                asked.append(Read(memory[start : start + sectors(nbytes)], None, read.urgent, offset=offset))
                self._disk.submit(asked[-1])
            read.parts = asked
        return asked
