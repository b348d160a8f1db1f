"""Which experts are on the device: requests and forecasts in, slots out, with the rules that keep them safe.

The base flow around pool, policy and link. What may lose its slot, in this order:

1. a resident expert that neither the running layer nor an outstanding forecast needs (the policy chooses);
2. a queued prefetch (dropped), the last one asked for first;
3. an arrived prefetch, then one under way (waited for): a layer that runs comes before a forecast.

An expert of the running layer is never given up. Everything here is called by the thread that runs the model.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Sequence

from expertcast.runtime.cache import CachePolicy
from expertcast.runtime.links import Copy, Link
from expertcast.runtime.slots import SlotPool, SlotState
from expertcast.runtime.statistics import LayerStatistics, RunStatistics


class Residency:
    """Books and rules; keys are layer * E + expert.

    Args:
        keep: False gives an expert's slot back as soon as its layer has run (every step loads all it needs).
    """

    def __init__(
        self, pool: SlotPool, link: Link, policy: CachePolicy, stats: RunStatistics, *, experts: int, keep: bool = True
    ) -> None:
        self.pool, self.link, self.policy, self.stats = pool, link, policy, stats
        self.keep = keep
        self._experts = experts
        self._block_bytes = pool.layout.block_bytes
        self._running: set[int] = set()
        self._wanted: set[int] = set()
        """Keys of outstanding forecasts that have a slot."""
        self._asked: dict[int, list[int]] = {}
        """The same by layer, in the order they were asked for; may name keys that lost their slot since."""
        self._copies: dict[int, Copy] = {}
        """Copies not known to have arrived."""
        self._unused: set[int] = set()
        """Prefetched, not requested so far."""
        self._just_used: set[int] = set()
        """Prefetched, requested by the running layer for the first time."""
        self._needed = _Union(self._running, self._wanted, self._copies)
        self._needed_now = _Union(self._running, self._copies)

    def holds(self, key: int) -> bool:
        """Whether the expert has a slot, arrived or not."""
        return key in self.pool.slots

    def settle(self, layer: int, needed: Sequence[int]) -> None:
        """The routing of `layer` is known: forget its forecast, and drop queued prefetches it does not need."""
        self._sweep(needed)
        asked = self._asked.pop(layer, None)
        if asked is None:
            return
        for key in set(asked).difference(needed) & self._wanted:
            self._wanted.discard(key)
            if not self._drop(key) and not self.keep and key not in self._copies:
                self._evict(key)
        self._wanted.difference_update(asked)

    def request(self, keys: Sequence[int]) -> None:
        """Bring experts of one layer in, which is running; misses before anything else; they stay until `release`."""
        slots, copies, unused = self.pool.slots, self._copies, self._unused
        self._running.update(keys)
        missing = [key for key in keys if key not in slots]
        stats = self._layer_stats(keys)
        stats.requests += len(keys)
        stats.misses += len(missing)
        stats.hits += len(keys) - len(missing)
        for key in copies.keys() & keys:
            copy = copies[key]
            if not copy.done and not copy.urgent:
                self.link.promote(copy)
        first_used = unused.intersection(keys)
        unused -= first_used
        self._just_used |= first_used
        stats.prefetched_used += len(first_used)
        for key in missing:
            if not self.pool.free_count:
                self._make_room()
            self._load(key, stats, urgent=True)

    def prefetch(self, keys: Sequence[int]) -> None:
        """Ask for experts of one later layer, most needed first; those without room are left out."""
        if not keys:
            return
        self._sweep(keys)
        slots = self.pool.slots
        stats = self._layer_stats(keys)
        self._wanted.update(key for key in keys if key in slots)
        self._asked.setdefault(keys[0] // self._experts, []).extend(keys)
        missing = [key for key in keys if key not in slots]
        self.link.read_ahead(missing)
        for key in missing:
            if not self.pool.free_count:
                victim = self.policy.victim(self._needed)
                if victim is None:
                    return
                self._evict(victim)
            self._wanted.add(key)
            self._load(key, stats, urgent=False)
            self._unused.add(key)
            stats.prefetched += 1

    def wait(self, keys: Sequence[int]) -> None:
        """Make compute wait for these requested experts of one layer; their slots are in use now."""
        start = time.perf_counter()
        stats, copies, just_used, use = self._layer_stats(keys), self._copies, self._just_used, self.policy.use
        for key in keys:
            copy = copies.get(key)
            if key in just_used:
                just_used.remove(key)
                stats.prefetched_in_time += copy is None or self.link.poll(copy)
            if copy is not None:
                self._arrive(key, copy)
            use(key)
        self.pool.mark(keys, SlotState.IN_USE)
        stats.waited_s += time.perf_counter() - start

    def release(self, keys: Sequence[int]) -> None:
        """Compute with these experts has been launched."""
        slots = self.pool.slots
        self.link.mark_read([slots[key] for key in keys])
        self._running.difference_update(keys)
        self.pool.mark(keys, SlotState.READY)
        if not self.keep:
            for key in keys:
                if key not in self._wanted:
                    self._evict(key)

    def abandon(self) -> None:
        """A forward was cut short: nothing is running or forecast any more."""
        self.pool.mark(
            [key for key in self._running if key in self.pool.slots and key not in self._copies], SlotState.READY
        )
        self._running.clear()
        self._just_used.clear()
        for key in list(self._wanted):
            self._drop(key)
        self._wanted.clear()
        self._asked.clear()
        if not self.keep:
            for key in [key for key in self.pool.resident() if key not in self._copies]:
                self._evict(key)

    def reset(self) -> None:
        """Forget every expert: something cut one of our calls short, and books and copies may not agree."""
        self.link.restart()
        self.pool.clear()
        self.policy.clear()
        for books in (self._running, self._wanted, self._asked, self._copies, self._unused, self._just_used):
            books.clear()

    def withdraw(self, keys: Iterable[int]) -> None:
        """The layer does not need these requested experts after all."""
        self._running.difference_update(keys)
        self._just_used.difference_update(keys)

    def _sweep(self, needed: Container[int] = ()) -> None:
        """Notice copies that have arrived by themselves, so that their slots can be given up; not the needed ones'."""
        if not self._copies:
            return
        self.link.progress()
        running = self._running
        for key, copy in [entry for entry in self._copies.items() if entry[1].done and entry[0] not in running]:
            del self._copies[key]
            self.pool.mark((key,), SlotState.READY)
            if copy.error is not None or (not self.keep and key not in self._wanted and key not in needed):
                self._evict(key)  # after a failed prefetch the layer's own request tries again

    def _load(self, key: int, stats: LayerStatistics, *, urgent: bool) -> None:
        slot = self.pool.take(key)
        self.policy.insert(key)
        try:
            self._copies[key] = self.link.submit(key, slot, urgent=urgent)
        except BaseException:
            self._evict(key)
            raise
        stats.bytes_moved += self._block_bytes

    def _arrive(self, key: int, copy: Copy) -> None:
        """Wait for a copy; one that failed gives its slot back before the error goes on."""
        try:
            self.link.wait(copy)
        except Exception:
            self._running.discard(key)
            del self._copies[key]
            self._evict(key)
            raise
        del self._copies[key]
        self.pool.mark((key,), SlotState.READY)

    def _make_room(self) -> None:
        victim = self.policy.victim(self._needed)
        if victim is None:
            for key in reversed(list(self._copies)):
                if key not in self._running and self._drop(key):
                    return
            victim = self.policy.victim(self._needed_now)
        if victim is None:
            victim = self.policy.victim(self._running)
            assert victim is not None, "a chunk holds more experts than there are slots"
            self._arrive(victim, self._copies[victim])
        self._evict(victim)

    def _drop(self, key: int) -> bool:
        """Take a queued prefetch back, if it has not started. Frees its slot."""
        copy = self._copies.get(key)
        if copy is None or not self.link.cancel(copy):
            return False
        stats = self._layer_stats((key,))
        stats.bytes_moved -= self._block_bytes
        if key in self._unused:  # else a request that was withdrawn
            stats.prefetched -= 1
            stats.dropped += 1
        del self._copies[key]
        self._evict(key)
        return True

    def _evict(self, key: int) -> None:
        self.policy.remove(key)
        self.pool.release(key)
        self._unused.discard(key)
        self._wanted.discard(key)

    def _layer_stats(self, keys: Sequence[int]) -> LayerStatistics:
        """Counters of the layer that the keys belong to."""
        return self.stats.layers[keys[0] // self._experts]


class _Union:
    """Membership in any of two or three live collections."""

    __slots__ = ("_first", "_second", "_third")

    def __init__(self, first: Container[int], second: Container[int], third: Container[int] = ()) -> None:
        self._first, self._second, self._third = first, second, third

    def __contains__(self, key: object) -> bool:
        return key in self._first or key in self._second or key in self._third
