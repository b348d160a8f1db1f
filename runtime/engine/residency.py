"""Which experts are on the device: requests and forecasts in, slots out, with the rules that keep them safe.

The base flow around pool, policy and link. What may lose its slot, in this order:

1. a resident expert that neither the running layer nor an outstanding forecast needs (the policy chooses);
2. a queued prefetch (dropped), the last one asked for first;
3. an arrived prefetch, then one under way (waited for): a layer that runs comes before a forecast.

An expert of the running layer is never given up. Everything here is called by the thread that runs the model.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from expertcast.runtime.links.base import Copy, Link
from expertcast.runtime.policies.scope import Eviction
from expertcast.runtime.recording.statistics import LayerStatistics, RunStatistics
from expertcast.runtime.storage.precision import FULL, is_better
from expertcast.runtime.storage.slots import SlotPool, SlotState


class Residency:
    """Books and rules; keys are layer * E + expert.

    Args:
        eviction: chooses victims, and says how many slots a layer may use.
        keep: False gives an expert's slot back as soon as its layer has run (every step loads all it needs).
    """

    def __init__(
        self, pool: SlotPool, link: Link, eviction: Eviction, stats: RunStatistics, *, experts: int, keep: bool = True
    ) -> None:
        self.pool, self.link, self.eviction, self.stats = pool, link, eviction, stats
        self.keep = keep
        self._experts = experts
        self._policies = eviction.by_layer
        self._shares = eviction.shares
        self._held_by = [0] * len(eviction.by_layer)
        """Slots that each layer's experts have; kept only where layers have shares."""
        self._block_bytes = pool.layout.block_bytes
        self._running: set[int] = set()
        self._wanted: set[int] = set()
        """Keys of outstanding forecasts that have a slot."""
        self._asked: dict[int, list[int]] = {}
        """The same by layer, in the order they were asked for; may name keys that lost their slot since."""
        self._copies: dict[int, Copy] = {}
        """Copies not known to have arrived."""
        self._packed: dict[int, str] = {}
        """Precision of the experts that are held, or on their way, in less than the full one."""
        self._unused: set[int] = set()
        """Prefetched, not requested so far."""
        self._just_used: set[int] = set()
        """Prefetched, requested by the running layer for the first time."""
        self._given_up: set[int] = set()
        """Evicted for another expert's sake in this pass."""
        self._follows_link = False
        self._busy_until_s = 0.0
        self._needed = _Union(self._running, self._wanted, self._copies)
        self._needed_now = _Union(self._running, self._copies)

    @property
    def idle(self) -> bool:
        """Nothing is on its way."""
        self._sweep()
        return not self._copies

    def follow_link(self) -> None:
        """Keep account of the link's time from now on, for :attr:`backlog_s`."""
        self._follows_link = True

    @property
    def backlog_s(self) -> float:
        """Seconds until the copies that are on their way have arrived, as far as is known."""
        most_s = len(self._copies) * self.link.copy_s
        return min(most_s, max(0.0, self._busy_until_s - self.link.clock()))

    @property
    def awaits(self) -> bool:
        """Whether the running layer needs an expert that is on its way."""
        return not self._running.isdisjoint(self._copies)

    def holds(self, key: int) -> bool:
        """Whether the expert has a slot, arrived or not."""
        return key in self.pool.slots

    def held(self, layer: int) -> dict[int, str]:
        """The layer's experts (0..E-1) that have a slot, with the precision of what is or will be in it."""
        first, slots, packed = layer * self._experts, self.pool.slots, self._packed
        return {expert: packed.get(first + expert, FULL) for expert in range(self._experts) if first + expert in slots}

    def limit(self, layer: int) -> int:
        """Most experts of a layer that can have a slot at once."""
        return self.pool.count if self._shares is None else self._shares[layer]

    def free(self, layer: int) -> int:
        """Free slots that the layer's experts may take."""
        return self.pool.free_count if self._shares is None else self._shares[layer] - self._held_by[layer]

    def victim(self, layer: int) -> int | None:
        """What would be given up for a prefetch of the layer's experts; None for a free slot, or if nothing may be."""
        return None if self.free(layer) else self._policies[layer].victim(self._needed)

    def start_pass(self, fresh: bool) -> None:
        """A forward starts; `fresh`: with new texts."""
        self._given_up.clear()
        self.eviction.start_pass(fresh)

    def settle(self, layer: int, needed: Sequence[int]) -> None:
        """The routing of `layer` is known: forget its forecast, and drop queued prefetches it does not need."""
        self._sweep(needed)
        self._policies[layer].start_layer(layer, needed)
        asked = self._asked.pop(layer, None)
        if asked is None:
            return
        for key in set(asked).difference(needed) & self._wanted:
            self._wanted.discard(key)
            if not self._drop(key) and not self.keep and key not in self._copies:
                self._evict(key)
        self._wanted.difference_update(asked)

    def request(self, keys: Sequence[int], precision: Mapping[int, str] | None = None) -> None:
        """Bring experts of one layer in, which is running; misses before anything else; they stay until `release`.

        Args:
            precision: of keys that need not come in full; a held key is asked for again where this is better than
                what it holds, and counts as a miss.
        """
        slots, copies, unused = self.pool.slots, self._copies, self._unused
        self._running.update(keys)
        if precision:
            self._give_back_worse(keys, precision)
        missing = [key for key in keys if key not in slots]
        stats = self._layer_stats(keys)
        stats.requests += len(keys)
        stats.misses += len(missing)
        stats.hits += len(keys) - len(missing)
        stats.collisions += len(self._given_up.intersection(missing))
        for key in copies.keys() & keys:
            copy = copies[key]
            if not copy.done and not copy.urgent:
                self.link.promote(copy)
        first_used = unused.intersection(keys)
        unused -= first_used
        self._just_used |= first_used
        stats.prefetched_used += len(first_used)
        layer = keys[0] // self._experts
        for key in missing:
            if not self.free(layer):
                self._make_room(layer)
            self._load(key, stats, urgent=True, precision=FULL if precision is None else precision.get(key, FULL))

    def prefetch(self, keys: Sequence[int]) -> None:
        """Ask for experts of one later layer, most needed first; those without room are left out."""
        if not keys:
            return
        self._sweep(keys)
        slots, layer = self.pool.slots, keys[0] // self._experts
        self.link.observer.asked(layer, keys)
        stats, policy = self.stats.layers[layer], self._policies[layer]
        held = [key for key in keys if key in slots]
        self._wanted.update(held)
        policy.touch(held)
        self._asked.setdefault(layer, []).extend(keys)
        missing = [key for key in keys if key not in slots]
        self.link.read_ahead(missing)
        for key in missing:
            if not self.free(layer):
                victim = policy.victim(self._needed)
                if victim is None:
                    return
                self._give_up(victim)
            self._wanted.add(key)
            self._prefetch_one(key, stats)

    def load_idle(self, key: int) -> None:
        """Load an expert that no outstanding forecast asks for: it may be given up again like any other."""
        layer = key // self._experts
        victim = self.victim(layer)
        if victim is not None:
            self._give_up(victim)
        if self.free(layer):
            self._prefetch_one(key, self.stats.layers[layer])

    def free_up(self, layer: int, count: int, keep: Container[int]) -> None:
        """Give slots up until `count` are free for the layer, in the policy's order, none of `keep`."""
        protected = _Union(self._running, self._wanted, self._copies, keep)
        while self.free(layer) < count:
            victim = self._policies[layer].victim(protected)
            if victim is None:
                return
            self._give_up(victim)

    def wait(self, keys: Sequence[int]) -> None:
        """Make compute wait for these requested experts of one layer; their slots are in use now."""
        start = self.link.clock()
        stats, copies, just_used = self._layer_stats(keys), self._copies, self._just_used
        for key in keys:
            copy = copies.get(key)
            if key in just_used:
                just_used.remove(key)
                stats.prefetched_in_time += copy is None or self.link.poll(copy)
            if copy is not None:
                self._arrive(key, copy)
        self._policies[keys[0] // self._experts].use(keys)
        self.pool.mark(keys, SlotState.IN_USE)
        stats.waited_s += self.link.clock() - start

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
        self.eviction.clear()
        self._held_by = [0] * len(self._held_by)
        for books in (
            self._running, self._wanted, self._asked, self._copies, self._packed, self._unused, self._just_used,
            self._given_up,
        ):  # fmt: skip
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
            if copy.error is not None:
                del self._copies[key]
                self._evict(key)  # the layer's own request tries again
                continue
            self._arrived(key, copy)
            if not self.keep and key not in self._wanted and key not in needed:
                self._evict(key)

    def _prefetch_one(self, key: int, stats: LayerStatistics) -> None:
        self._load(key, stats, urgent=False)
        self._unused.add(key)
        stats.prefetched += 1

    def _load(self, key: int, stats: LayerStatistics, *, urgent: bool, precision: str = FULL) -> None:
        slot = self.pool.take(key)
        layer = key // self._experts
        if self._shares is not None:
            self._held_by[layer] += 1
        full = precision == FULL
        self._policies[layer].insert(key, full)
        try:
            if full:
                self._copies[key] = self.link.submit(key, slot, urgent=urgent)
            else:
                self._packed[key] = precision
                self._copies[key] = self.link.submit(key, slot, urgent=urgent, precision=precision)
        except BaseException:
            self._evict(key)
            raise
        moved = self._block_bytes if full else self.link.block_bytes(precision)
        stats.bytes_moved += moved
        if self._follows_link:
            copy_s = self.link.copy_s * moved / self._block_bytes
            self._busy_until_s = max(self._busy_until_s, self.link.clock()) + copy_s

    def _give_back_worse(self, keys: Sequence[int], precision: Mapping[int, str]) -> None:
        """Free the slots of held experts that are asked for in a better precision; not while a copy is under way."""
        for key in keys:
            held = self._packed.get(key)
            if held is not None and key in precision and key not in self._copies and is_better(precision[key], held):
                self._evict(key)

    def _arrive(self, key: int, copy: Copy) -> None:
        """Wait for a copy; one that failed gives its slot back before the error goes on."""
        try:
            self.link.wait(copy)
        except Exception:
            self._running.discard(key)
            del self._copies[key]
            self._evict(key)
            raise
        self._arrived(key, copy)

    def _arrived(self, key: int, copy: Copy) -> None:
        del self._copies[key]
        if copy.precision != FULL:
            self.link.expand(copy)
        self.pool.mark((key,), SlotState.READY)

    def _make_room(self, layer: int) -> None:
        policy = self._policies[layer]
        victim = policy.victim(self._needed)
        if victim is None:
            for key in reversed(list(self._copies)):
                if key not in self._running and self._shares_slots(key, layer) and self._drop(key):
                    return
            victim = policy.victim(self._needed_now)
        if victim is None:
            victim = policy.victim(self._running)
            assert victim is not None, "a chunk holds more experts than there are slots"
            self._arrive(victim, self._copies[victim])
        self._give_up(victim)

    def _shares_slots(self, key: int, layer: int) -> bool:
        return self._shares is None or key // self._experts == layer

    def _drop(self, key: int) -> bool:
        """Take a queued prefetch back, if it has not started. Frees its slot."""
        copy = self._copies.get(key)
        if copy is None or not self.link.cancel(copy):
            return False
        stats = self._layer_stats((key,))
        moved = self._block_bytes if copy.precision == FULL else self.link.block_bytes(copy.precision)
        stats.bytes_moved -= moved
        if self._follows_link:
            self._busy_until_s -= self.link.copy_s * moved / self._block_bytes
        if key in self._unused:  # else a request that was withdrawn
            stats.prefetched -= 1
            stats.dropped += 1
        del self._copies[key]
        self._evict(key)
        return True

    def _give_up(self, key: int) -> None:
        """Evict for another expert's sake."""
        self._given_up.add(key)
        self.stats.layers[key // self._experts].evicted += 1
        self.link.given_up()
        self._evict(key)

    def _evict(self, key: int) -> None:
        layer = key // self._experts
        self._policies[layer].remove(key)
        if self._shares is not None:
            self._held_by[layer] -= 1
        self.pool.release(key)
        self._packed.pop(key, None)
        self._unused.discard(key)
        self._wanted.discard(key)

    def _layer_stats(self, keys: Sequence[int]) -> LayerStatistics:
        """Counters of the layer that the keys belong to."""
        return self.stats.layers[keys[0] // self._experts]


class _Union:
    """Membership in any of two to four live collections."""

    __slots__ = ("_first", "_fourth", "_second", "_third")

    def __init__(
        self,
        first: Container[int],
        second: Container[int],
        third: Container[int] = (),
        fourth: Container[int] = (),
    ) -> None:
        self._first, self._second, self._third, self._fourth = first, second, third, fourth

    def __contains__(self, key: object) -> bool:
        return key in self._first or key in self._second or key in self._third or key in self._fourth
