"""Cache of experts on the device: their slots, the copies in flight, and protection against eviction.

Experts lose their slots in this order:

1. a resident expert that neither the running layer nor a pending forecast needs (the policy chooses);
2. an expert that is kept for a verification's later layers, those of the last layer first;
3. a queued prefetch, the last one requested first;
4. an arrived prefetch, then one in flight (waited for): a running layer comes before a forecast.

An expert of the running layer never loses its slot. Three words for a slot that becomes free:

    lose        it is free, for any reason
    drop        a copy that has not begun is cancelled, and its expert loses the slot
    give up     an expert loses the slot to another expert, which is counted

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
    """Keys that a coming verification needs, kept until their layer runs; nearer layers are safer.

    Args:
        layers: L.
        experts: E.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self._experts = experts
        self._by_layer: list[set[int]] = [set() for _ in range(layers)]
        self.keys: set[int] = set()
        """All keys; read only."""

    def add(self, key: int) -> None:
        """Keep an expert until its layer runs."""
        self.keys.add(key)
        self._by_layer[key // self._experts].add(key)

    def pop(self, layer: int) -> set[int]:
        """Return a layer's keys and keep them no longer: the layer runs now."""
        keys, self._by_layer[layer] = self._by_layer[layer], set()
        self.keys -= keys
        return keys

    def clear(self) -> None:
        """Keep no expert any longer."""
        if self.keys:
            for keys in self._by_layer:
                keys.clear()
            self.keys.clear()

    def farthest(self, beyond: int, held: Container[int], but: Container[int]) -> int | None:
        """Return a held expert of the last layer after `beyond`, not in `but`; None: there is none."""
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
        link: copies experts into slots.
        eviction: follows which experts get and lose slots; sets how many slots a layer may use.
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
        """Slots of each layer; None: all layers share all slots."""
        self._held_by = [0] * len(eviction.by_layer)
        """Slots in use by layer; counted only where layers have shares."""
        self._block_bytes = pool.layout.block_bytes
        self.copies: dict[int, Transfer] = {}
        """Copies not known to have arrived."""
        self._packed: dict[int, str] = {}
        """Precision of experts that are held or in flight in less than full precision."""
        self.running: set[int] = set()
        """Keys that the running layer requested and has not computed with."""
        self._wanted: set[int] = set()
        """Keys with a slot that a pending forecast requested."""
        self._asked: dict[int, list[int]] = {}
        """Keys that forecasts requested by layer, in order; some may have lost their slot since."""
        self._unused: set[int] = set()
        """Keys that were prefetched and not requested since."""
        self._first_used: set[int] = set()
        """Prefetched keys that the running layer requested for the first time."""
        self._evicted: set[int] = set()
        """Keys that were evicted for another expert in this pass."""
        self.window = Window(len(eviction.by_layer), experts)
        """Keys kept for a coming verification; :meth:`load_ahead` loads them one by one."""
        self._needed = _Union(self.running, self._wanted, self.copies, self.window.keys)
        """Keys that a prefetch may not evict."""
        self._awaited = _Union(self._wanted, self.window.keys)
        """Keys exempt from immediate release when `keep` is False."""
        self._needed_now = _Union(self.running, self.copies)
        """Keys that the running layer evicts last."""
        self.only_arrived = False
        """Whether experts in flight do not count as held: for a draft that does not wait for copies."""
        self.stats = stats
        """Counters; another object may replace them between two forwards."""
        self._observers = [link.observer]
        self.observer = Observers(self._observers)
        self.waited_s = 0.0
        """Seconds that the model's thread has waited for copies."""
        self.paced = False
        """Whether :meth:`backlog_s` is kept."""
        self._busy_until_s = 0.0
        """Time at which the link ends the submitted copies, by their mean duration."""

    def tell(self, observer: Observer) -> None:
        """Add an observer of all later events."""
        self._observers.append(observer)
        self.observer = Observers(self._observers)

    def backlog_s(self, now: float) -> float:
        """Return the seconds from `now` until all submitted copies have ended; kept where the cache is `paced`."""
        return min(len(self.copies) * self.link.copy_s, max(0.0, self._busy_until_s - now))

    def _link_s(self, nbytes: int) -> float:
        return self.link.copy_s * nbytes / self._block_bytes

    def _waited(self, layer: int, seconds: float) -> None:
        self.waited_s += seconds
        self.stats.layers[layer].waited_s += seconds

    @property
    def idle(self) -> bool:
        """Whether no copy is in flight."""
        self._sweep()
        return not self.copies

    def holds(self, key: int) -> bool:
        """Whether the expert has a slot, arrived or not."""
        return key in self._slots

    def is_prefetched_for(self, layer: int) -> bool:
        """Whether forecasts have requested experts of a layer."""
        return layer in self._asked

    def held(self, layer: int) -> dict[int, str]:
        """Return the layer's experts (0..E-1) that have a slot, with their precision; without experts in flight while
        :attr:`only_arrived` is set."""
        first, slots, packed = layer * self.experts, self._slots, self._packed
        coming: Container[int] = ()
        if self.only_arrived and self.copies:
            self._sweep()
            coming = self.copies
        keys = (key for key in range(first, first + self.experts) if key in slots and key not in coming)
        return {key - first: packed.get(key, FULL) for key in keys}

    def limit(self, layer: int) -> int:
        """Return the largest number of a layer's experts that can have slots at once."""
        return self.pool.count if self._shares is None else self._shares[layer]

    def free(self, layer: int) -> int:
        """Return the number of free slots that the layer's experts may take."""
        return len(self.pool.free_slots) if self._shares is None else self._shares[layer] - self._held_by[layer]

    def reset(self) -> None:
        """Forget all experts: a call was interrupted, and records and copies may not agree."""
        self.link.restart()
        self.pool.clear()
        self.eviction.clear()
        self._held_by = [0] * len(self._held_by)
        for held in (
            self.copies, self._packed, self.running, self._wanted, self._asked, self._unused, self._first_used,
            self._evicted,
        ):  # fmt: skip
            held.clear()
        self.window.clear()

    def victim(self, layer: int) -> int | None:
        """Return the expert that a prefetch for the layer would evict; None: a slot is free, or all are protected."""
        return None if self.free(layer) else self._policies[layer].victim(self._needed)

    def start_pass(self, fresh: bool) -> None:
        """Start a forward; `fresh`: with new sequences."""
        self._evicted.clear()
        self.eviction.start_pass(fresh)

    def settle(self, layer: int, needed: Sequence[int]) -> None:
        """End the forecasts for a layer whose routing is known, or was changed after its request.

        Queued prefetches that the layer does not need are dropped. No requested expert counts as running.
        """
        self.running.clear()
        self._first_used.clear()
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
        """Load experts of the running layer, before all other copies; they stay until :meth:`release`.

        Args:
            keys: distinct.
            precision: by key, where it may be less than full; a held key in a lower precision is loaded anew, and
                counts as a miss.

        Returns:
            The number of keys without a slot, and of prefetched keys that are requested for the first time.
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
        self._first_used |= first_used
        layer = keys[0] // self.experts
        count, misses = self.stats.layers[layer], len(missing)
        count.requests += len(keys)
        count.misses += misses
        count.hits += len(keys) - misses
        count.collisions += len(self._evicted.intersection(missing))
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
        """Prefetch experts of one later layer, most needed first; experts without room are left out."""
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
        """Load an expert that no pending forecast needs: it may be evicted like all others."""
        layer = key // self.experts
        victim = self.victim(layer)
        if victim is not None:
            self._give_up(victim)
        if self.free(layer):
            self._load(key, False)

    def load_ahead(self, key: int) -> bool:
        """Load an expert of the window, in place of one outside the window or of a later layer.

        Returns:
            Whether there was room.
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
        """Cancel the queued copies of experts that are not needed any longer."""
        for key in keys:
            if key in self._unused:
                self._drop(key)

    def keep_full_only(self) -> None:
        """Evict all experts in less than full precision, for exact passes. No layer may be running."""
        for key in list(self._packed):
            copy = self.copies.get(key)
            if copy is not None and not self._drop(key):
                self._arrive(key, copy, needed=False)
            if key in self._slots:
                self._lose(key)

    def free_up(self, layer: int, count: int, keep: Container[int]) -> None:
        """Evict experts, none of `keep`, in the policy's order, until `count` slots are free for the layer."""
        protected = _Union(self.running, self._wanted, self.copies, keep)
        while self.free(layer) < count:
            victim = self._policies[layer].victim(protected)
            if victim is None:
                return
            self._give_up(victim)

    def wait(self, keys: Sequence[int]) -> None:
        """Make compute wait for requested experts of one layer; their slots are in use from now on."""
        start = self.link.clock()
        copies, just_used, in_time = self.copies, self._first_used, 0
        if just_used:  # all are polled before the first wait, during which others arrive
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
        """Release experts with which compute has been launched."""
        slots = self._slots
        self.link.mark_read([slots[key] for key in keys])
        self.running.difference_update(keys)
        self.pool.mark(keys, SlotState.READY)
        if not self.keep:
            for key in keys:
                if key not in self._awaited:
                    self._lose(key)

    def abandon(self) -> None:
        """Forget requests and forecasts of an interrupted forward."""
        self.pool.mark([key for key in self.running if key in self._slots and key not in self.copies], SlotState.READY)
        self.running.clear()
        self._first_used.clear()
        for key in list(self._wanted):
            self._drop(key)
        self._wanted.clear()
        self._asked.clear()
        self.window.clear()
        if not self.keep:
            for key in [key for key in self.pool.resident() if key not in self.copies]:
                self._lose(key)

    def fill(self, keys: Sequence[int]) -> int:
        """Load experts into free slots, in order, and wait for them: policies take the last one for the newest.

        Bytes are counted, but neither requests nor forecasts.

        Args:
            keys: experts with a slot are skipped, experts without a free slot left out.

        Returns:
            The number of loaded experts.
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
        """Evict held experts that are needed in a better precision, unless they are in flight."""
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
        """Return the window's expert of the last layer after `layer`; None with shares: layers keep their slots."""
        if self._shares is not None:
            return None
        return self.window.farthest(layer, self._slots, self._needed_now)

    def _give_up(self, key: int) -> None:
        """Evict an expert for another one."""
        self._evicted.add(key)
        self.stats.layers[key // self.experts].evicted += 1
        if self.link.write_back_s:
            self.link.write_back()
        self._lose(key)

    def _sweep(self, needed: Container[int] = ()) -> None:
        """Notice copies that have arrived, apart from needed ones, so that their slots can be reused."""
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
        """Submit a copy into a free slot; not `urgent`: it is a prefetch."""
        slot = self.pool.take(key)
        layer = key // self.experts
        if self._shares is not None:
            self._held_by[layer] += 1
        full, nbytes = precision == FULL, self.pool.layout.nbytes_of(layer)
        self._policies[layer].insert(key, full)
        try:
            if not full:
                self._packed[key] = precision
                nbytes = self.link.block_bytes(precision)
            self.copies[key] = self.link.submit(key, slot, urgent=urgent, precision=precision)
        except BaseException:
            self._lose(key)
            raise
        if blocked_s := self.link.blocked_s:  # the link read the disk's pages or copied within this call
            self._waited(layer, blocked_s)
        count = self.stats.layers[layer]
        count.bytes_moved += nbytes
        if not urgent:
            self._unused.add(key)
            count.prefetched += 1
        if self.paced:
            self._busy_until_s = max(self._busy_until_s, self.link.clock()) + self._link_s(nbytes)

    def _arrive(self, key: int, copy: Transfer, *, needed: bool = True) -> None:
        """Wait for a copy. The expert of a failed copy loses its slot; the error is raised if it is `needed`."""
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
        """Cancel an expert's queued copy; return whether there was one that had not begun."""
        copy = self.copies.get(key)
        if copy is None or not self.link.cancel(copy):
            return False
        # not unused: a layer requested the expert, and withdrew the request
        layer, full = key // self.experts, copy.precision == FULL
        nbytes = self.pool.layout.nbytes_of(layer) if full else self.link.block_bytes(copy.precision)
        count = self.stats.layers[layer]
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
        """Free an expert's slot, for any reason; no copy of the expert may be in flight."""
        layer = key // self.experts
        self._policies[layer].remove(key)
        if self._shares is not None:
            self._held_by[layer] -= 1
        self.pool.release(key)
        self._packed.pop(key, None)
        self._unused.discard(key)
        self._wanted.discard(key)
