"""Which experts are on the device: requests and forecasts in, slots out, with the rules that keep them safe.

What may lose its slot, in this order:

1. a resident expert that neither the running layer nor an outstanding forecast needs (the policy chooses);
2. a queued prefetch, the last one asked for first;
3. an arrived prefetch, then one under way (waited for): a layer that runs comes before a forecast.

An expert of the running layer is never given up. Three words for a slot that becomes free:

    lose        it is free, for whatever reason (:meth:`Books.lose`)
    drop        a copy is taken back that has not begun, and its expert loses the slot
    give up     an expert loses the slot for another one's sake, which is counted

Everything here is called by the thread that runs the model.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from expertcast.runtime.engine.books import Union
from expertcast.runtime.engine.transfers import Transfers
from expertcast.runtime.storage.precision import FULL, is_better
from expertcast.runtime.storage.slots import SlotState


class Residency(Transfers):
    """The rules; keys are layer * E + expert."""

    def victim(self, layer: int) -> int | None:
        """What would be given up for a prefetch of the layer's experts; None for a free slot, or if nothing may be."""
        return None if self.books.free(layer) else self._policies[layer].victim(self.books.needed)

    def start_pass(self, fresh: bool) -> None:
        """A forward starts; `fresh`: with new texts."""
        self.books.given_up.clear()
        self.eviction.start_pass(fresh)

    def settle(self, layer: int, needed: Sequence[int]) -> None:
        """The routing of `layer` is known, or has been changed after it was requested.

        Its forecast is over: queued prefetches that it does not need are dropped. What was requested is not running.
        """
        books = self.books
        books.running.clear()
        books.just_used.clear()
        self._sweep(needed)
        self._policies[layer].start_layer(layer, needed)
        asked = books.asked.pop(layer, None)
        if asked is None:
            return
        for key in set(asked).difference(needed) & books.wanted:
            books.wanted.discard(key)
            if not self._drop(key) and not self.keep and key not in books.copies:
                books.lose(key)
        books.wanted.difference_update(asked)

    def request(self, keys: Sequence[int], precision: Mapping[int, str] | None = None) -> None:
        """Bring experts of one layer in, which is running; misses before anything else; they stay until `release`.

        Args:
            keys: distinct.
            precision: of keys that need not come in full; a held key is asked for again where this is better than
                what it holds, and counts as a miss.
        """
        books = self.books
        slots, copies, unused = books.slots, books.copies, books.unused
        books.running.update(keys)
        if precision:
            self._lose_worse(keys, precision)
        missing = [key for key in keys if key not in slots]
        for key in copies.keys() & keys:
            copy = copies[key]
            if not copy.done and not copy.urgent:
                self.link.promote(copy)
        first_used = unused.intersection(keys)
        unused -= first_used
        books.just_used |= first_used
        layer = keys[0] // self._experts
        again = len(books.given_up.intersection(missing))
        self.observer.requested(layer, keys, missing, again, len(first_used))
        for key in missing:
            if not books.free(layer):
                self._make_room(layer)
            self._load(key, True, FULL if precision is None else precision.get(key, FULL))

    def prefetch(self, keys: Sequence[int]) -> None:
        """Ask for experts of one later layer, most needed first; those without room are left out."""
        if not keys:
            return
        self._sweep(keys)
        books = self.books
        slots, layer = books.slots, keys[0] // self._experts
        self.observer.asked(layer, keys)
        policy = self._policies[layer]
        held = [key for key in keys if key in slots]
        books.wanted.update(held)
        policy.touch(held)
        books.asked.setdefault(layer, []).extend(keys)
        missing = [key for key in keys if key not in slots]
        self.link.read_ahead(missing)
        for key in missing:
            if not books.free(layer):
                victim = policy.victim(books.needed)
                if victim is None:
                    return
                self._give_up(victim)
            books.wanted.add(key)
            self._load(key, False)

    def load_idle(self, key: int) -> None:
        """Load an expert that no outstanding forecast asks for: it may be given up again like any other."""
        layer = key // self._experts
        victim = self.victim(layer)
        if victim is not None:
            self._give_up(victim)
        if self.books.free(layer):
            self._load(key, False)

    def free_up(self, layer: int, count: int, keep: Container[int]) -> None:
        """Give experts up until `count` slots are free for the layer, in the policy's order, none of `keep`."""
        books = self.books
        protected = Union(books.running, books.wanted, books.copies, keep)
        while books.free(layer) < count:
            victim = self._policies[layer].victim(protected)
            if victim is None:
                return
            self._give_up(victim)

    def wait(self, keys: Sequence[int]) -> None:
        """Make compute wait for these requested experts of one layer; their slots are in use now."""
        start = self.link.clock()
        copies, just_used, in_time = self.books.copies, self.books.just_used, 0
        for key in keys:
            copy = copies.get(key)
            if key in just_used:
                just_used.remove(key)
                in_time += copy is None or self.link.poll(copy)
            if copy is not None:
                self._arrive(key, copy)
        layer = keys[0] // self._experts
        self._policies[layer].use(keys)
        self.pool.mark(keys, SlotState.IN_USE)
        self.observer.waited(layer, self.link.clock() - start, in_time)

    def release(self, keys: Sequence[int]) -> None:
        """Compute with these experts has been launched."""
        books = self.books
        slots = books.slots
        self.link.mark_read([slots[key] for key in keys])
        books.running.difference_update(keys)
        self.pool.mark(keys, SlotState.READY)
        if not self.keep:
            for key in keys:
                if key not in books.wanted:
                    books.lose(key)

    def abandon(self) -> None:
        """A forward was cut short: nothing is running or forecast any more."""
        books = self.books
        self.pool.mark(
            [key for key in books.running if key in books.slots and key not in books.copies], SlotState.READY
        )
        books.running.clear()
        books.just_used.clear()
        for key in list(books.wanted):
            self._drop(key)
        books.wanted.clear()
        books.asked.clear()
        if not self.keep:
            for key in [key for key in self.pool.resident() if key not in books.copies]:
                books.lose(key)

    def _lose_worse(self, keys: Sequence[int], precision: Mapping[int, str]) -> None:
        """Held experts that are asked for in a better precision lose their slots; not while a copy is under way."""
        books = self.books
        for key in keys:
            held = books.packed.get(key)
            if held is not None and key in precision and key not in books.copies and is_better(precision[key], held):
                books.lose(key)

    def _make_room(self, layer: int) -> None:
        """Free a slot for an expert of the running layer."""
        books, policy = self.books, self._policies[layer]
        victim = policy.victim(books.needed)
        if victim is None:
            for key in reversed(list(books.copies)):
                own = books.shares is None or key // self._experts == layer
                if own and key not in books.running and self._drop(key):
                    return
            victim = policy.victim(books.needed_now)
        if victim is None:
            victim = policy.victim(books.running)
            assert victim is not None, "a chunk holds more experts than there are slots"
            self._arrive(victim, books.copies[victim])
        self._give_up(victim)

    def _give_up(self, key: int) -> None:
        """Lose an expert for another one's sake."""
        self.books.given_up.add(key)
        self._stats.layers[key // self._experts].evicted += 1  # no event: five calls more per layer on average
        self.link.given_up()
        self.books.lose(key)
