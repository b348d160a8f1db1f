"""Which experts are on the device: requests and forecasts in, slots out, with the rules that keep them safe.

What may lose its slot, in this order:

1. a resident expert that neither the running layer nor an outstanding forecast needs (the policy chooses);
2. one that is kept for a verification's later layers, those of the last layer first;
3. a queued prefetch, the last one asked for first;
4. an arrived prefetch, then one under way (waited for): a layer that runs comes before a forecast.

An expert of the running layer is never given up. Three words for a slot that becomes free:

    lose        it is free, for whatever reason (:meth:`Books._lose`)
    drop        a copy is taken back that has not begun, and its expert loses the slot
    give up     an expert loses the slot for another one's sake, which is counted

Everything here is called by the thread that runs the model.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from expertcast.runtime.engine.books import Union
from expertcast.runtime.engine.filling import Filling
from expertcast.runtime.storage.precision import FULL, is_better
from expertcast.runtime.storage.slots import SlotState


class Residency(Filling):
    """The rules; keys are layer * E + expert."""

    def victim(self, layer: int) -> int | None:
        """What would be given up for a prefetch of the layer's experts; None for a free slot, or if nothing may be."""
        return None if self.free(layer) else self._policies[layer].victim(self._needed)

    def start_pass(self, fresh: bool) -> None:
        """A forward starts; `fresh`: with new texts."""
        self._given_up.clear()
        self.eviction.start_pass(fresh)

    def settle(self, layer: int, needed: Sequence[int]) -> None:
        """The routing of `layer` is known, or has been changed after it was requested.

        Its forecast is over: queued prefetches that it does not need are dropped. What was requested is not running.
        """
        self.running.clear()
        self._just_used.clear()
        self._sweep(needed)
        self._policies[layer].start_layer(layer, needed)
        asked = self._asked.pop(layer, None)
        if asked is None:
            return
        for key in set(asked).difference(needed) & self._wanted:
            self._wanted.discard(key)
            if not self._drop(key) and not self.keep and key not in self.copies:
                self._lose(key)
        self._wanted.difference_update(asked)

    def request(self, keys: Sequence[int], precision: Mapping[int, str] | None = None) -> None:
        """Bring experts of one layer in, which is running; misses before anything else; they stay until `release`.

        Args:
            keys: distinct.
            precision: of keys that need not come in full; a held key is asked for again where this is better than
                what it holds, and counts as a miss.
        """
        slots, copies, unused = self._slots, self.copies, self._unused
        self.running.update(keys)
        if precision:
            self._lose_worse(keys, precision)
        missing = [key for key in keys if key not in slots]
        for key in keys:
            copy = copies.get(key)
            if copy is not None and not copy.done and not copy.urgent:
                self.link.promote(copy)
        first_used = unused.intersection(keys)
        unused -= first_used
        self._just_used |= first_used
        layer = keys[0] // self.experts
        again = len(self._given_up.intersection(missing))
        self.observer.requested(layer, keys, missing, again, len(first_used))
        room = self.free(layer)
        for key in self.link.in_order(missing):
            if room:
                room -= 1
            else:
                self._make_room(layer)
            self._load(key, True, FULL if precision is None else precision.get(key, FULL))

    def prefetch(self, keys: Sequence[int]) -> None:
        """Ask for experts of one later layer, most needed first; those without room are left out."""
        if not keys:
            return
        self._sweep(keys)
        slots, layer = self._slots, keys[0] // self.experts
        self.observer.asked(layer, keys)
        policy = self._policies[layer]
        held = [key for key in keys if key in slots]
        self._wanted.update(held)
        policy.touch(held)
        self._asked.setdefault(layer, []).extend(keys)
        missing = [key for key in keys if key not in slots]
        self.link.read_ahead(missing)
        room = self.free(layer)
        for key in missing:
            if room:
                room -= 1
            else:
                victim = policy.victim(self._needed)
                if victim is None:
                    return
                self._give_up(victim)
            self._wanted.add(key)
            self._load(key, False)

    def load_idle(self, key: int) -> None:
        """Load an expert that no outstanding forecast asks for: it may be given up again like any other."""
        layer = key // self.experts
        victim = self.victim(layer)
        if victim is not None:
            self._give_up(victim)
        if self.free(layer):
            self._load(key, False)

    def load_ahead(self, key: int) -> bool:
        """Load an expert that the window keeps, in place of one that it does not keep or keeps for a later layer.

        Returns:
            Whether there was such room.
        """
        layer = key // self.experts
        if not self.free(layer):
            victim = self._policies[layer].victim(self._needed)
            if victim is None:
                victim = self._farthest(layer)
            if victim is None:
                return False
            self._give_up(victim)
        self._load(key, False)
        return True

    def take_back(self, keys: Iterable[int]) -> None:
        """These experts are not needed after all: their copies that have not begun are not made."""
        for key in keys:
            if key in self._unused:
                self._drop(key)

    def keep_full_only(self) -> None:
        """Give up what is held in less than full precision: what follows is exact. No layer is running."""
        for key in list(self._packed):
            copy = self.copies.get(key)
            if copy is not None and not self._drop(key):
                self._arrive(key, copy, needed=False)
            if key in self._slots:
                self._lose(key)

    def free_up(self, layer: int, count: int, keep: Container[int]) -> None:
        """Give experts up until `count` slots are free for the layer, in the policy's order, none of `keep`."""
        protected = Union(self.running, self._wanted, self.copies, keep)
        while self.free(layer) < count:
            victim = self._policies[layer].victim(protected)
            if victim is None:
                return
            self._give_up(victim)

    def wait(self, keys: Sequence[int]) -> None:
        """Make compute wait for these requested experts of one layer; their slots are in use now."""
        start = self.link.clock()
        copies, just_used, in_time = self.copies, self._just_used, 0
        if just_used:  # asked of all of them before any is waited for: others arrive meanwhile
            for key in keys:
                if key in just_used:
                    just_used.remove(key)
                    copy = copies.get(key)
                    in_time += copy is None or self.link.poll(copy)
        for key in keys:
            copy = copies.get(key)
            if copy is not None:
                self._arrive(key, copy)
        self.link.check()
        layer = keys[0] // self.experts
        self._policies[layer].use(keys)
        self.pool.mark(keys, SlotState.IN_USE)
        self.observer.waited(layer, self.link.clock() - start, in_time)

    def release(self, keys: Sequence[int]) -> None:
        """Compute with these experts has been launched."""
        slots = self._slots
        self.link.mark_read([slots[key] for key in keys])
        self.running.difference_update(keys)
        self.pool.mark(keys, SlotState.READY)
        if not self.keep:
            for key in keys:
                if key not in self._awaited:
                    self._lose(key)

    def abandon(self) -> None:
        """A forward was cut short: nothing is running or forecast any more."""
        self.pool.mark([key for key in self.running if key in self._slots and key not in self.copies], SlotState.READY)
        self.running.clear()
        self._just_used.clear()
        for key in list(self._wanted):
            self._drop(key)
        self._wanted.clear()
        self._asked.clear()
        self.window.clear()
        if not self.keep:
            for key in [key for key in self.pool.resident() if key not in self.copies]:
                self._lose(key)

    def _lose_worse(self, keys: Sequence[int], precision: Mapping[int, str]) -> None:
        """Held experts that are asked for in a better precision lose their slots; not while a copy is under way."""
        for key in keys:
            held = self._packed.get(key)
            if held is not None and key in precision and key not in self.copies and is_better(precision[key], held):
                self._lose(key)

    def _make_room(self, layer: int) -> None:
        """Free a slot for an expert of the running layer."""
        policy = self._policies[layer]
        victim = policy.victim(self._needed)
        if victim is None:
            victim = self._farthest(layer)
        if victim is None:
            for key in reversed(list(self.copies)):
                own = self._shares is None or key // self.experts == layer
                if own and key not in self.running and self._drop(key):
                    return
            victim = policy.victim(self._needed_now)
        if victim is None:
            victim = policy.victim(self.running)
            assert victim is not None, "a chunk holds more experts than there are slots"
            self._arrive(victim, self.copies[victim], needed=False)
        if victim in self._slots:  # its copy may have failed
            self._give_up(victim)

    def _farthest(self, layer: int) -> int | None:
        """What the window keeps for the last layer after this one; with shares, a slot of that layer's is of no use."""
        if self._shares is not None:
            return None
        return self.window.farthest(layer, self._slots, self._needed_now)

    def _give_up(self, key: int) -> None:
        """Lose an expert for another one's sake."""
        self._given_up.add(key)
        self._stats.layers[key // self.experts].evicted += 1
        if self.link.write_back_s:
            self.link.write_back()
        self._lose(key)
