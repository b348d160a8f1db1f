"""Which job a decoding thread takes next, and when it had better wait."""

from __future__ import annotations

import threading

import torch

from expertcast.data.memory import usable_processors
from expertcast.runtime.storage.coded_read import CodedRead
from expertcast.runtime.storage.decode_plan import Job
from expertcast.runtime.storage.read_queue import ReadQueue


class ReadyJobs:
    """Jobs that can be done, of the read that comes first.

    Args:
        changed: guards this and the reads; notified when there may be something to do.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed, self._processors = changed, usable_processors()
        self._reads = ReadQueue[CodedRead](lambda read: bool(read.ready))
        self.held_back = False
        """Whether the model computes on these processors: forecasts are decoded while somebody waits, at other times
        only by processors that torch leaves free. To decode beside the model costs it more than it saves."""
        self.awaited = 0
        """Threads that wait for a read, and compute nothing meanwhile."""
        self._early = 0
        """Threads that are at a forecast's job."""
        self._closed = False

    def add(self, read: CodedRead, job: Job) -> None:
        """One more can be done."""
        read.ready.append(job)
        if len(read.ready) == 1:
            self._reads.push(read)
        self._changed.notify()

    def promote(self, read: CodedRead) -> None:
        """The read has become urgent."""
        if read.ready:
            self._reads.push(read)
            self._changed.notify_all()

    def take(self) -> tuple[CodedRead, Job, bool] | None:
        """The next one, and whether it is a forecast's; None: no more come."""
        with self._changed:
            while True:
                read = self._reads.first()
                if read is not None and (read.urgent or self._may_be_early()):
                    read.running += 1
                    self._early += not read.urgent
                    return read, read.ready.popleft(), not read.urgent
                if self._closed:
                    return None
                self._changed.wait()

    def done(self, early: bool) -> None:
        """One that was taken has been done."""
        self._early -= early

    def close(self) -> None:
        """Forget all; who takes gets nothing from now on."""
        self._closed = True
        self._reads.clear()
        self._changed.notify_all()

    def _may_be_early(self) -> bool:
        free = self._processors - torch.get_num_threads()
        return not self.held_back or self.awaited > 0 or self._early < free
