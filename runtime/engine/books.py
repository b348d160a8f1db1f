"""Who has a slot, what is on its way, and what is needed: the books that :mod:`.residency` keeps its rules by.

E routed experts per layer. An expert's key is layer * E + expert.
"""

from __future__ import annotations

from collections.abc import Container

from expertcast.runtime.engine.window import Window
from expertcast.runtime.links.base import Copy, Link
from expertcast.runtime.policies.scope import Eviction
from expertcast.runtime.recording.observer import Observer, Observers, heard
from expertcast.runtime.recording.statistics import RunStatistics
from expertcast.runtime.storage.precision import FULL
from expertcast.runtime.storage.slots import SlotPool


class Books:
    """Sets of keys, with the copies that begin, arrive, fail or are taken back.

    Args:
        pool: the slots.
        link: what fills them.
        eviction: is told who gets and loses a slot; says how many slots a layer may use.
        stats: counts what happens; another one may take its place between two forwards.
        experts: E.
        keep: False frees an expert's slot as soon as its layer has run (every step loads all it needs).
    """

    def __init__(
        self, pool: SlotPool, link: Link, eviction: Eviction, stats: RunStatistics, *, experts: int, keep: bool = True
    ) -> None:
        self.pool, self.link, self.eviction, self.experts, self.keep = pool, link, eviction, experts, keep
        self._slots = pool.slots
        """Slot of each expert that has one, arrived or not."""
        self._policies = eviction.by_layer
        self._shares = eviction.shares
        """Slots of each layer; None: all slots are everybody's."""
        self._held_by = [0] * len(eviction.by_layer)
        """Slots that each layer's experts have; kept only where layers have shares."""
        self._block_bytes = pool.layout.block_bytes
        self.copies: dict[int, Copy] = {}
        """Copies not known to have arrived."""
        self._packed: dict[int, str] = {}
        """Precision of the experts that are held, or on their way, in less than the full one."""
        self.running: set[int] = set()
        """Requested by the running layer, which has not computed with them so far."""
        self._wanted: set[int] = set()
        """Asked for by an outstanding forecast, and with a slot."""
        self._asked: dict[int, list[int]] = {}
        """The same by layer, in the order they were asked for; may name keys that lost their slot since."""
        self._unused: set[int] = set()
        """Prefetched, not requested so far."""
        self._just_used: set[int] = set()
        """Prefetched, requested by the running layer for the first time."""
        self._given_up: set[int] = set()
        """Evicted for another expert's sake in this pass."""
        self.window = Window(len(eviction.by_layer), experts)
        """Kept for a verification to come; asked for one by one, by :meth:`Residency.load_ahead`."""
        self._needed = Union(self.running, self._wanted, self.copies, self.window.keys)
        """What a forecast's expert may not push out."""
        self._awaited = Union(self._wanted, self.window.keys)
        """What is not lost without a cache once it has arrived."""
        self._needed_now = Union(self.running, self.copies)
        """What a running layer's expert pushes out last."""
        self.only_arrived = False
        """Whether experts on their way are not held: for a draft that waits for nothing."""
        self._listeners = [link.observer]
        self.stats = stats

    @property
    def stats(self) -> RunStatistics:
        """Counts what happens; another one may take its place between two forwards."""
        return self._stats

    @stats.setter
    def stats(self, stats: RunStatistics) -> None:
        self._stats = stats
        self._listen()

    def tell(self, observer: Observer) -> None:
        """Tell one more observer what happens from now on."""
        self._listeners.append(observer)
        self._listen()

    def _listen(self) -> None:
        self.observer = Observers([self._stats, *self._listeners])
        self._loading = heard(self.observer, "loading")

    @property
    def idle(self) -> bool:
        """Nothing is on its way."""
        self._sweep()
        return not self.copies

    def holds(self, key: int) -> bool:
        """Whether the expert has a slot, arrived or not."""
        return key in self._slots

    def is_asked(self, layer: int) -> bool:
        """Whether experts of a layer have been asked for before it runs."""
        return layer in self._asked

    def held(self, layer: int) -> dict[int, str]:
        """The layer's experts (0..E-1) that have a slot, with the precision of what is or will be in it; of those that
        are on their way none, while only what has arrived counts."""
        first, slots, packed = layer * self.experts, self._slots, self._packed
        coming: Container[int] = ()
        if self.only_arrived and self.copies:
            self._sweep()
            coming = self.copies
        keys = (key for key in range(first, first + self.experts) if key in slots and key not in coming)
        return {key - first: packed.get(key, FULL) for key in keys}

    def limit(self, layer: int) -> int:
        """Most experts of a layer that can have a slot at once."""
        return self.pool.count if self._shares is None else self._shares[layer]

    def free(self, layer: int) -> int:
        """Free slots that the layer's experts may take."""
        return len(self.pool.free_slots) if self._shares is None else self._shares[layer] - self._held_by[layer]

    def reset(self) -> None:
        """Forget every expert: something cut one of our calls short, and books and copies may not agree."""
        self.link.restart()
        self.pool.clear()
        self.eviction.clear()
        self._held_by = [0] * len(self._held_by)
        for held in (
            self.copies, self._packed, self.running, self._wanted, self._asked, self._unused, self._just_used,
            self._given_up,
        ):  # fmt: skip
            held.clear()
        self.window.clear()

    def _sweep(self, needed: Container[int] = ()) -> None:
        """Notice copies that have arrived by themselves, so that their slots can be given up; not the needed ones'."""
        copies, running = self.copies, self.running
        if not copies:
            return
        self.link.progress()
        for key, copy in [entry for entry in copies.items() if entry[1].done and entry[0] not in running]:
            if copy.error is not None:
                del copies[key]
                self._lose(key)  # the layer's own request tries again
                continue
            self._arrived(key, copy)
            if not self.keep and key not in self._awaited and key not in needed:
                self._lose(key)

    def _load(self, key: int, urgent: bool, precision: str = FULL) -> None:
        """Give the link a copy into a free slot; not `urgent`: no layer has asked for it.

        Statistics are counted here, and `loading` is told only to those who listen: as an event it costs 3 to 5 calls
        per layer and token.
        """
        slot = self.pool.take(key)
        layer = key // self.experts
        if self._shares is not None:
            self._held_by[layer] += 1
        full = precision == FULL
        self._policies[layer].insert(key, full)
        try:
            if full:  # a link that moves no others need not know of precisions
                self.copies[key] = self.link.submit(key, slot, urgent=urgent)
                nbytes = self._block_bytes
            else:
                self._packed[key] = precision
                self.copies[key] = self.link.submit(key, slot, urgent=urgent, precision=precision)
                nbytes = self.link.block_bytes(precision)
        except BaseException:
            self._lose(key)
            raise
        if held_s := self.copies[key].held_s:  # the disk's pages came meanwhile, or the copy was made
            self.observer.waited(layer, held_s, 0)
        count = self._stats.layers[layer]
        count.bytes_moved += nbytes
        if not urgent:
            self._unused.add(key)
            count.prefetched += 1
        if self._loading is not None:
            self._loading(layer, nbytes, urgent)

    def _arrive(self, key: int, copy: Copy, *, needed: bool = True) -> None:
        """Wait for a copy; the expert of one that failed loses its slot before the error goes on, if it is `needed`."""
        try:
            self.link.wait(copy)
        except Exception:
            self.running.discard(key)
            del self.copies[key]
            self._lose(key)
            if needed:
                raise
            return
        self._arrived(key, copy)

    def _arrived(self, key: int, copy: Copy) -> None:
        del self.copies[key]
        if copy.precision != FULL:
            self.link.expand(copy)
        self.pool.arrived(key)

    def _drop(self, key: int) -> bool:
        """Take a queued copy back, if there is one that has not begun."""
        copy = self.copies.get(key)
        if copy is None or not self.link.cancel(copy):
            return False
        # not unused: requested, and that was withdrawn
        nbytes = self._block_bytes if copy.precision == FULL else self.link.block_bytes(copy.precision)
        self.observer.dropped(key // self.experts, nbytes, key in self._unused)
        del self.copies[key]
        self._lose(key)
        return True

    def _lose(self, key: int) -> None:
        """The expert's slot is free, for whatever reason; no copy of it may be under way."""
        layer = key // self.experts
        self._policies[layer].remove(key)
        if self._shares is not None:
            self._held_by[layer] -= 1
        self.pool.release(key)
        self._packed.pop(key, None)
        self._unused.discard(key)
        self._wanted.discard(key)


class Union:
    """Membership in any of two to four live collections."""

    __slots__ = ("_first", "_fourth", "_second", "_third")

    def __init__(
        self, first: Container[int], second: Container[int], third: Container[int] = (), fourth: Container[int] = ()
    ) -> None:
        self._first, self._second, self._third, self._fourth = first, second, third, fourth

    def __contains__(self, key: object) -> bool:
        return key in self._first or key in self._second or key in self._third or key in self._fourth
