"""Experts on their way: copies that begin, arrive, fail or are taken back, and the books that say so.

All calls come from the thread that runs the model.
"""

from __future__ import annotations

from collections.abc import Container

from expertcast.runtime.engine.books import Books
from expertcast.runtime.links.base import Copy, Link
from expertcast.runtime.policies.scope import Eviction
from expertcast.runtime.recording.observer import Observer, Observers
from expertcast.runtime.recording.statistics import RunStatistics
from expertcast.runtime.storage.precision import FULL
from expertcast.runtime.storage.slots import SlotPool, SlotState


class Transfers:
    """Books and link together; keys are layer * E + expert.

    Args:
        pool: the slots.
        link: what fills them.
        eviction: chooses victims, and says how many slots a layer may use.
        stats: counts what happens; another one may take its place between two forwards.
        experts: E.
        keep: False frees an expert's slot as soon as its layer has run (every step loads all it needs).
    """

    def __init__(
        self, pool: SlotPool, link: Link, eviction: Eviction, stats: RunStatistics, *, experts: int, keep: bool = True
    ) -> None:
        self.pool, self.link, self.eviction = pool, link, eviction
        self.keep = keep
        self.books = Books(pool, eviction, experts)
        self._experts = experts
        self._policies = eviction.by_layer
        self._block_bytes = pool.layout.block_bytes
        self._listeners = [link.observer]
        self.stats = stats

    @property
    def stats(self) -> RunStatistics:
        """Counts what happens."""
        return self._stats

    @stats.setter
    def stats(self, stats: RunStatistics) -> None:
        self._stats = stats
        self.observer = Observers([stats, *self._listeners])

    def tell(self, observer: Observer) -> None:
        """Tell one more observer what happens from now on."""
        self._listeners.append(observer)
        self.observer = Observers([self._stats, *self._listeners])

    @property
    def idle(self) -> bool:
        """Nothing is on its way."""
        self._sweep()
        return not self.books.copies

    def reset(self) -> None:
        """Forget every expert: something cut one of our calls short, and books and copies may not agree."""
        self.link.restart()
        self.books.clear()

    def _sweep(self, needed: Container[int] = ()) -> None:
        """Notice copies that have arrived by themselves, so that their slots can be given up; not the needed ones'."""
        books = self.books
        copies, running = books.copies, books.running
        if not copies:
            return
        self.link.progress()
        for key, copy in [entry for entry in copies.items() if entry[1].done and entry[0] not in running]:
            if copy.error is not None:
                del copies[key]
                books.lose(key)  # the layer's own request tries again
                continue
            self._arrived(key, copy)
            if not self.keep and key not in books.wanted and key not in needed:
                books.lose(key)

    def _load(self, key: int, urgent: bool, precision: str = FULL) -> None:
        """Give the link a copy into a free slot; not `urgent`: no layer has asked for it."""
        books = self.books
        slot = books.take(key, precision)
        submit = self.link.submit
        try:
            if precision == FULL:  # a link that moves no others need not know of precisions
                books.copies[key] = submit(key, slot, urgent=urgent)
                nbytes = self._block_bytes
            else:
                books.copies[key] = submit(key, slot, urgent=urgent, precision=precision)
                nbytes = self.link.block_bytes(precision)
        except BaseException:
            books.lose(key)
            raise
        if not urgent:
            books.unused.add(key)
        self.observer.loading(key // self._experts, nbytes, urgent)

    def _arrive(self, key: int, copy: Copy) -> None:
        """Wait for a copy; the expert of one that failed loses its slot before the error goes on."""
        try:
            self.link.wait(copy)
        except Exception:
            self.books.running.discard(key)
            del self.books.copies[key]
            self.books.lose(key)
            raise
        self._arrived(key, copy)

    def _arrived(self, key: int, copy: Copy) -> None:
        del self.books.copies[key]
        if copy.precision != FULL:
            self.link.expand(copy)
        self.pool.mark((key,), SlotState.READY)

    def _drop(self, key: int) -> bool:
        """Take a queued copy back, if there is one that has not begun."""
        books = self.books
        copy = books.copies.get(key)
        if copy is None or not self.link.cancel(copy):
            return False
        # not unused: requested, and that was withdrawn
        nbytes = self._block_bytes if copy.precision == FULL else self.link.block_bytes(copy.precision)
        self.observer.dropped(key // self._experts, nbytes, key in books.unused)
        del books.copies[key]
        books.lose(key)
        return True
