"""The cache of experts on the device: who has which slot, what is in flight, what is protected.

What may lose its slot, in this order:

1. a resident expert that neither the running layer nor an outstanding forecast needs (the policy chooses);
2. one that is kept for a verification's later layers, those of the last layer first;
3. a queued prefetch, the last one requested first;
4. an arrived prefetch, then one in flight (waited for): a layer that runs comes before a forecast.

An expert of the running layer is never given up. Three words for a slot that becomes free:

    lose        it is free, for whatever reason
    drop        a copy that has not begun is cancelled, and its expert loses the slot
    give up     an expert loses the slot for another one's sake, which is counted

All calls come from the thread that runs the model. L MoE layers, E routed experts per layer; an expert's key is
layer * E + expert.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from expertcast.runtime.links.base import Link
from expertcast.runtime.policies.eviction import Eviction
from expertcast.runtime.recording.recorder import Observer, Observers
from expertcast.runtime.recording.statistics import RunStatistics
from expertcast.runtime.storage.layout import FULL, is_better
from expertcast.runtime.storage.slots import SlotPool, SlotState
from expertcast.runtime.storage.transfer import Transfer


class Window:
    """Keys that a coming verification needs, kept until their layer runs: the nearer the layer, the surer.

    Args:
        layers: L.
        experts: E.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self._experts = experts
        self._by_layer: list[set[int]] = [set() for _ in range(layers)]
        self.keys: set[int] = set()
        """All of them; read only."""

    def add(self, key: int) -> None:
        """The expert will be needed."""
        self.keys.add(key)
        self._by_layer[key // self._experts].add(key)

    def pop(self, layer: int) -> set[int]:
        """The layer's turn has come: what was kept for it is as any other expert from now on."""
        keys, self._by_layer[layer] = self._by_layer[layer], set()
        self.keys -= keys
        return keys

    def clear(self) -> None:
        """Nothing is kept any more."""
        if self.keys:
            for keys in self._by_layer:
                keys.clear()
            self.keys.clear()

    def farthest(self, beyond: int, held: Container[int], but: Container[int]) -> int | None:
        """A held expert of the last layer beyond that one, none of `but`: the one that is needed last."""
        if not self.keys:
            return None
        for keys in reversed(self._by_layer[beyond + 1 :]):
            for key in keys:
                if key in held and key not in but:
                    return key
        return None


class _Union:
    """Membership in any of two to four live collections."""

    __slots__ = ("_first", "_fourth", "_second", "_third")

    def __init__(
        self, first: Container[int], second: Container[int], third: Container[int] = (), fourth: Container[int] = ()
    ) -> None:
        self._first, self._second, self._third, self._fourth = first, second, third, fourth

    def __contains__(self, key: object) -> bool:
        return key in self._first or key in self._second or key in self._third or key in self._fourth


class ExpertCache:
    """Slots, copies in flight and protection of one model's experts.

    Args:
        pool: the slots.
        link: what fills them.
        eviction: is told who gets and loses a slot; says how many slots a layer may use.
        stats: counts what happens.
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
        self.copies: dict[int, Transfer] = {}
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
        """Kept for a verification to come; asked for one by one, by :meth:`load_ahead`."""
        self._needed = _Union(self.running, self._wanted, self.copies, self.window.keys)
        """What a forecast's expert may not push out."""
        self._awaited = _Union(self._wanted, self.window.keys)
        """What is not lost without a cache once it has arrived."""
        self._needed_now = _Union(self.running, self.copies)
        """What a running layer's expert pushes out last."""
        self.only_arrived = False
        """Whether experts on their way are not held: for a draft that waits for nothing."""
        self.stats = stats
        """Counts what happens; another one may take its place between two forwards."""
        self._observers = [link.observer]
        self.observer = Observers(self._observers)
        self.waited_s = 0.0
        """Seconds that copies have held the model's thread up so far."""
        self.paced = False
        """Whether :meth:`backlog_s` is kept."""
        self._busy_until_s = 0.0
        """When the link will have done what it has been given, by what copies take on average."""

    def tell(self, observer: Observer) -> None:
        """Tell one more observer what happens from now on."""
        self._observers.append(observer)
        self.observer = Observers(self._observers)

    def backlog_s(self, now: float) -> float:
        """Seconds that the copies under way will take the link from `now` on; kept where the cache is `paced`."""
        return min(len(self.copies) * self.link.copy_s, max(0.0, self._busy_until_s - now))

    def _link_s(self, nbytes: int) -> float:
        return self.link.copy_s * nbytes / self._block_bytes

    def _waited(self, layer: int, seconds: float) -> None:
        self.waited_s += seconds
        self.stats.layers[layer].waited_s += seconds

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

    def request(self, keys: Sequence[int], precision: Mapping[int, str] | None = None) -> tuple[int, int]:
        """Bring experts of one layer in, which is running; misses before anything else; they stay until `release`.

        Args:
            keys: distinct.
            precision: of keys that need not come in full; a held key is asked for again where this is better than
                what it holds, and counts as a miss.

        Returns:
            How many of them had no slot, and how many have one by a forecast and are asked for the first time.
        """
        slots, copies, unused = self._slots, self.copies, self._unused
        self.running.update(keys)
        if precision:
            self._lose_worse(keys, precision)
        missing = [key for key in keys if key not in slots]
        for key in keys if copies else ():
            copy = copies.get(key)
            if copy is not None and not copy.done and not copy.urgent:
                self.link.promote(copy)
        first_used = unused.intersection(keys)
        unused -= first_used
        self._just_used |= first_used
        layer = keys[0] // self.experts
        count, misses = self.stats.layers[layer], len(missing)
        count.requests += len(keys)
        count.misses += misses
        count.hits += len(keys) - misses
        count.collisions += len(self._given_up.intersection(missing))
        count.prefetched_used += len(first_used)
        room = self.free(layer)
        for key in self.link.in_order(missing):
            if room:
                room -= 1
            else:
                self._make_room(layer)
            self._load(key, True, FULL if precision is None else precision.get(key, FULL))
        return misses, len(first_used)

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
        protected = _Union(self.running, self._wanted, self.copies, keep)
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
        self.stats.layers[layer].prefetched_in_time += in_time
        self._waited(layer, self.link.clock() - start)

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

    def fill(self, keys: Sequence[int]) -> int:
        """Load experts into free slots, in this order, and wait for them: policies take the last one for the newest.

        Their bytes are counted, but neither as requests nor as forecasts.

        Args:
            keys: those that have a slot are passed over; those for which none is free are left out.

        Returns:
            How many were loaded.
        """
        self.link.follow()
        loaded = []
        for key in keys:
            if key not in self._slots and self.free(key // self.experts):
                self._load(key, True)
                loaded.append(key)
        for key, copy in list(self.copies.items()):
            self._arrive(key, copy, needed=key in loaded)
        self.link.check()
        return len(loaded)

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
        self.stats.layers[key // self.experts].evicted += 1
        if self.link.write_back_s:
            self.link.write_back()
        self._lose(key)

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
        """Give the link a copy into a free slot; not `urgent`: no layer has asked for it."""
        slot = self.pool.take(key)
        layer = key // self.experts
        if self._shares is not None:
            self._held_by[layer] += 1
        full, nbytes = precision == FULL, self._block_bytes
        self._policies[layer].insert(key, full)
        try:
            if not full:
                self._packed[key] = precision
                nbytes = self.link.block_bytes(precision)
            self.copies[key] = self.link.submit(key, slot, urgent=urgent, precision=precision)
        except BaseException:
            self._lose(key)
            raise
        if held_s := self.link.held_s:  # the disk's pages came meanwhile, or the copy was made
            self._waited(layer, held_s)
        count = self.stats.layers[layer]
        count.bytes_moved += nbytes
        if not urgent:
            self._unused.add(key)
            count.prefetched += 1
        if self.paced:
            self._busy_until_s = max(self._busy_until_s, self.link.clock()) + self._link_s(nbytes)

    def _arrive(self, key: int, copy: Transfer, *, needed: bool = True) -> None:
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

    def _arrived(self, key: int, copy: Transfer) -> None:
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
        count = self.stats.layers[key // self.experts]
        count.bytes_moved -= nbytes
        if key in self._unused:
            count.prefetched -= 1
            count.dropped += 1
        if self.paced:
            self._busy_until_s -= self._link_s(nbytes)
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
