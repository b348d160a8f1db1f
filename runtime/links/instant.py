"""The simplest link."""

from __future__ import annotations

import time

from expertcast.runtime.links.base import Copy, Link
from expertcast.runtime.storage.precision import FULL


class InstantLink(Link):
    """Copies when asked, in the caller's thread: the simplest link, and the reference for the others."""

    name = "instant"

    def submit(self, key: int, slot: int, *, urgent: bool, precision: str = FULL) -> Copy:
        start = time.perf_counter()
        if precision == FULL:
            self._pool.block(slot).copy_(self._store.block(key))
        else:
            packed = self._store.copies(precision).block(key)
            self._pool.block(slot)[: packed.numel()] = packed
        copy = Copy(key, slot, urgent, started=True, done=True, precision=precision)
        self._count(copy, start, time.perf_counter())
        return copy

    def twin(self) -> Link:
        return InstantLink()

    def wait(self, copy: Copy) -> None:
        assert copy.done

    def restart(self) -> None:
        """Nothing is ever queued."""
