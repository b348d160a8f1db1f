"""Which experts are on the device: requests and forecasts in, slots out, with the rules that keep them safe.

The base flow around pool, policy and link. What may lose its slot, in this order:

1. a resident expert that neither the running layer nor an outstanding forecast needs (the policy chooses);
2. a queued prefetch (dropped), the last one asked for first;
3. an arrived prefetch, then one under way (waited for): a layer that runs comes before a forecast.

An expert of the running layer is never given up. Everything here is called by the thread that runs the model.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

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
        self._running: set[int] = set()
        self._wanted: dict[int, None] = {}
        """Keys of outstanding forecasts, in the order they were asked for."""
        self._copies: dict[int, Copy] = {}
        """Copies not known to have arrived."""
        self._unused: set[int] = set()
        """Prefetched, not requested so far."""
        self._just_used: set[int] = set()
        """Prefetched, requested by the running layer for the first time."""

    def holds(self, key: int) -> bool:
        """Whether the expert has a slot, arrived or not."""
        return key in self.pool.slots

    def settle(self, layer: int, needed: Iterable[int]) -> None:
        """The routing of `layer` is known: forget its forecast, and drop queued prefetches it does not need."""
        self._sweep()
        keys = set(needed)
        first = layer * self._experts
        for key in [key for key in self._wanted if first <= key < first + self._experts]:
            del self._wanted[key]
            if key not in keys and not self._drop(key) and not self.keep and key not in self._copies:
                self._evict(key)

    def request(self, keys: Iterable[int]) -> None:
        """Bring experts of the running layer in, misses before anything else; they stay until `release`."""
        keys = list(keys)
        missing = []
        for key in keys:
            stats = self._layer_stats(key)
            stats.requests += 1
            self._running.add(key)
            if not self.holds(key):
                stats.misses += 1
                missing.append(key)
                continue
            stats.hits += 1
            copy = self._copies.get(key)
            if copy is not None and not copy.done:
                self.link.promote(copy)
            if key in self._unused:
                self._unused.remove(key)
                self._just_used.add(key)
                stats.prefetched_used += 1
        for key in missing:
            if not self.pool.free_count:
                self._make_room()
            self._load(key, urgent=True)

    def prefetch(self, keys: Iterable[int]) -> None:
        """Ask for experts of later layers, most needed first; those without room are left out."""
        self._sweep()
        keys = list(keys)
        self._wanted.update(dict.fromkeys(key for key in keys if self.holds(key)))
        for key in keys:
            if self.holds(key):
                continue
            if not self.pool.free_count:
                victim = self.policy.victim(_Either(self._running, self._wanted, self._copies))
                if victim is None:
                    return
                self._evict(victim)
            self._wanted[key] = None
            self._load(key, urgent=False)
            self._unused.add(key)
            self._layer_stats(key).prefetched += 1

    def wait(self, keys: Iterable[int]) -> None:
        """Make compute wait for these requested experts; their slots are in use now."""
        start = time.perf_counter()
        layer = None
        for key in keys:
            layer = self._layer_stats(key)
            copy = self._copies.get(key)
            if key in self._just_used:
                self._just_used.remove(key)
                layer.prefetched_in_time += copy is None or self.link.poll(copy)
            if copy is not None:
                self._arrive(key, copy)
            self.policy.use(key)
            self.pool.mark(key, SlotState.IN_USE)
        if layer is not None:
            layer.waited_s += time.perf_counter() - start

    def release(self, keys: Iterable[int]) -> None:
        """Compute with these experts has been launched."""
        keys = list(keys)
        self.link.mark_read([self.pool.slots[key] for key in keys])
        for key in keys:
            self._running.discard(key)
            self.pool.mark(key, SlotState.READY)
            if not self.keep and key not in self._wanted:
                self._evict(key)

    def abandon(self) -> None:
        """A forward was cut short: nothing is running or forecast any more."""
        for key in self._running:
            if key in self.pool.slots and key not in self._copies:
                self.pool.mark(key, SlotState.READY)
        self._running.clear()
        self._just_used.clear()
        for key in list(self._wanted):
            self._drop(key)
        self._wanted.clear()
        if not self.keep:
            for key in [key for key in self.pool.resident() if key not in self._copies]:
                self._evict(key)

    def withdraw(self, keys: Iterable[int]) -> None:
        """The layer does not need these requested experts after all."""
        self._running.difference_update(keys)
        self._just_used.difference_update(keys)

    def _sweep(self) -> None:
        """Notice copies that have arrived by themselves, so that their slots can be given up."""
        for key, copy in list(self._copies.items()):
            if key in self._running or not self.link.poll(copy):
                continue
            del self._copies[key]
            self.pool.mark(key, SlotState.READY)
            if copy.error is not None or (not self.keep and key not in self._wanted):
                self._evict(key)  # after a failed prefetch the layer's own request tries again

    def _load(self, key: int, *, urgent: bool) -> None:
        slot = self.pool.take(key)
        self.policy.insert(key)
        try:
            self._copies[key] = self.link.submit(key, slot, urgent=urgent)
        except BaseException:
            self._evict(key)
            raise
        self._layer_stats(key).bytes_moved += self.pool.layout.block_bytes

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
        self.pool.mark(key, SlotState.READY)

    def _make_room(self) -> None:
        victim = self.policy.victim(_Either(self._running, self._wanted, self._copies))
        if victim is None:
            for key in reversed(list(self._copies)):
                if key not in self._running and self._drop(key):
                    return
            victim = self.policy.victim(_Either(self._running, self._copies))
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
        stats = self._layer_stats(key)
        stats.bytes_moved -= self.pool.layout.block_bytes
        stats.prefetched -= 1
        stats.dropped += 1
        del self._copies[key]
        self._evict(key)
        return True

    def _evict(self, key: int) -> None:
        self.policy.remove(key)
        self.pool.release(key)
        self._unused.discard(key)
        self._wanted.pop(key, None)

    def _layer_stats(self, key: int) -> LayerStatistics:
        return self.stats.layers[key // self._experts]


class _Either:
    """Membership in any of several collections, without building their union."""

    def __init__(self, *collections: set[int] | dict[int, None] | dict[int, Copy]) -> None:
        self._collections = collections

    def __contains__(self, key: object) -> bool:
        return any(key in collection for collection in self._collections)
