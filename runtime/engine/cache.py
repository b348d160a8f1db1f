"""Cache of experts on the device: their slots, the copies in flight, and protection against eviction.

When the running layer needs a slot, experts are evicted in this order:

1. a resident expert that neither the running layer nor a pending forecast needs (the policy chooses);
2. an expert kept for later layers of a verification, the last layer first;
3. a queued prefetch, the last one requested first;
4. an arrived prefetch;
5. a prefetch in flight, after a wait for its copy.

Experts of the running layer are never evicted. A slot becomes free in three ways:

    free        for any reason; the other two include it
    cancel      the expert's copy has not begun and is cancelled
    evict       another expert needs the slot; the statistics count it

All calls come from the thread that runs the model. L MoE layers, E routed experts per layer; an expert's key is
layer * E + expert.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.links.base import Link
from expertcast.runtime.policies.eviction import Eviction
from expertcast.runtime.recording.recorder import RunStatistics
from expertcast.runtime.storage.layout import FULL, is_better
from expertcast.runtime.storage.slots import SlotPool, SlotState
from expertcast.runtime.storage.transfer import Transfer


class Window:
    """Keys that a coming verification needs, protected until their layer runs; later layers are evicted first.

    Args:
        layers: L.
        experts: E.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self._experts = experts
        self._by_layer: list[set[int]] = [set() for _ in range(layers)]
        self.keys: set[int] = set()
        """All keys; read-only for callers."""

    def add(self, key: int) -> None:
        """Protect an expert until its layer runs."""
        self.keys.add(key)
        self._by_layer[key // self._experts].add(key)

    def pop(self, layer: int) -> set[int]:
        """Remove and return the keys of a layer that runs now."""
        keys, self._by_layer[layer] = self._by_layer[layer], set()
        self.keys -= keys
        return keys

    def clear(self) -> None:
        """Remove all keys."""
        if self.keys:
            for keys in self._by_layer:
                keys.clear()
            self.keys.clear()

    def victim(self, layers: Iterable[int], held: Container[int], protected: Container[int]) -> int | None:
        """Return a held, unprotected expert of the first possible of these layers; None: there is none."""
        for layer in layers:
            for key in self._by_layer[layer]:
                if key in held and key not in protected:
                    return key
        return None


class _Union:
    """Container that combines two to four collections; it follows their changes."""

    __slots__ = ("_first", "_fourth", "_second", "_third")

    def __init__(
        self, first: Container[int], second: Container[int], third: Container[int] = (), fourth: Container[int] = ()
    ) -> None:
        self._first, self._second, self._third, self._fourth = first, second, third, fourth

    def __contains__(self, key: object) -> bool:
        return key in self._first or key in self._second or key in self._third or key in self._fourth


class ExpertCache:
    """Assigns slots to experts, requests their copies, and protects experts that are needed from eviction.

    Args:
        pool: the slots.
        link: copies experts into slots.
        eviction: policy of each layer, informed of all experts that get or free slots, and slots of its group.
        stats: counters.
        experts: E.
        keep: False frees an expert's slot as soon as its layer has run, so that each step loads all its experts.
    """

    def __init__(
        self, pool: SlotPool, link: Link, eviction: Eviction, stats: RunStatistics, *, experts: int, keep: bool = True
    ) -> None:
        self.pool, self.link, self.eviction, self.experts, self.keep = pool, link, eviction, experts, keep
        self._slots = pool.slots
        """Slot of each expert that has one, experts in flight included."""
        self._policies = eviction.by_layer
        self._group_of, self._shares = eviction.group_of, eviction.shares
        self._held = [0] * len(eviction.shares)
        """Number of slots in use by each group."""
        self._region_of = list(map(pool.region_of, range(len(self._policies))))
        """Region of the pool for each layer."""
        self._block_bytes = pool.layout.block_bytes
        self.copies: dict[int, Transfer] = {}
        """Copies that have not been found to have arrived, by key."""
        self._packed: dict[int, str] = {}
        """Precision of experts that are held or in flight in less than full precision."""
        self.running: set[int] = set()
        """Keys that the running layer requested and for which compute has not been launched."""
        self._forecast_keys: set[int] = set()
        """Keys with a slot that a pending forecast requested."""
        self._forecasts: dict[int, list[int]] = {}
        """Keys that pending forecasts requested, by layer and in order; some may have no slot."""
        self._unused: set[int] = set()
        """Keys that were prefetched and have not been requested since."""
        self._streamed: set[int] = set()
        """Keys that were loaded with most of their layer, and have not been requested since: misses, though early."""
        self._first_used: set[int] = set()
        """Prefetched keys that the running layer requested for the first time."""
        self._evicted: set[int] = set()
        """Keys that were evicted in this pass."""
        self.window = Window(len(eviction.by_layer), experts)
        """Keys protected for a coming verification; :meth:`load_ahead` loads them one by one."""
        self._prefetch_protected = _Union(self.running, self._forecast_keys, self.copies, self.window.keys)
        """Keys that a prefetch must not evict."""
        self._exempt = _Union(self._forecast_keys, self.window.keys)
        """Keys whose slots stay allocated after use, even if `keep` is False."""
        self._demand_protected = _Union(self.running, self.copies)
        """Keys that the running layer evicts only if there are no others."""
        self.only_arrived = False
        """Whether :meth:`held` leaves out experts in flight, for drafts that do not wait for copies."""
        self.stats = stats
        """Counters; callers may replace the object between two forwards."""
        self.observer = link.observer
        self._clock = link.clock if link.driver is None else link.driver.clock
        self.waited_s = 0.0
        """Seconds that the model's thread has waited for copies, and for experts that the host computes."""
        self.paced = False
        """Whether to track the time for which the link is busy; required by :meth:`backlog_s`."""
        self._busy_until_s = 0.0
        """Estimated clock time at which all submitted copies have ended, from the link's seconds per copy."""

    def __repr__(self) -> str:
        """Slots, eviction and link."""
        return (
            f"ExpertCache({self.pool.count} slots, {len(self._slots)} in use, {len(self.copies)} copies in flight, "
            f"eviction={self._policies[0].name!r}, link={self.link.name!r})"
        )

    def backlog_s(self, now: float) -> float:
        """Estimate the seconds from `now` until all submitted copies have ended. Requires :attr:`paced`."""
        return min(len(self.copies) * self.link.copy_s, max(0.0, self._busy_until_s - now))

    def _copy_s(self, nbytes: int) -> float:
        return self.link.copy_s * nbytes / self._block_bytes

    def count_wait(self, layer: int, seconds: float) -> None:
        """Count seconds that a layer waited."""
        self.waited_s += seconds
        self.stats.layers[layer].waited_s += seconds

    @property
    def idle(self) -> bool:
        """Whether no copy is in flight."""
        self._collect_arrived()
        return not self.copies

    def holds(self, key: int) -> bool:
        """Whether the expert has a slot, even if it is still in flight."""
        return key in self._slots

    def is_ready(self, key: int) -> bool:
        """Whether the expert has a slot, and was not loaded early with most of its layer."""
        return key in self._slots and key not in self._streamed

    def is_prefetched_for(self, layer: int) -> bool:
        """Whether a pending forecast has requested experts of a layer."""
        return layer in self._forecasts

    def held(self, layer: int) -> dict[int, str]:
        """Return the precision of each of the layer's experts (0..E-1) that has a slot.

        Experts in flight are left out while :attr:`only_arrived` is set.
        """
        first, slots, packed = layer * self.experts, self._slots, self._packed
        coming: Container[int] = ()
        if self.only_arrived and self.copies:
            self._collect_arrived()
            coming = self.copies
        keys = (key for key in range(first, first + self.experts) if key in slots and key not in coming)
        return {key - first: packed.get(key, FULL) for key in keys}

    def limit(self, layer: int) -> int:
        """Return the largest number of a layer's experts that can have slots at once."""
        return self._shares[self._group_of[layer]]

    def free(self, layer: int) -> int:
        """Return the number of free slots that the layer's experts may take."""
        group = self._group_of[layer]
        return self._shares[group] - self._held[group]

    def reset(self) -> None:
        """Free all slots, after an interrupted call may have left the cache inconsistent with the copies."""
        self.link.restart()
        self.pool.clear()
        self.eviction.clear()
        self._held = [0] * len(self._held)
        for held in (
            self.copies, self._packed, self.running, self._forecast_keys, self._forecasts, self._unused,
            self._streamed, self._first_used, self._evicted,
        ):  # fmt: skip
            held.clear()
        self.window.clear()

    def start_pass(self, fresh: bool) -> None:
        """Start a forward pass; `fresh`: of new sequences."""
        self._evicted.clear()
        self.eviction.start_pass(fresh)

    def start_layer(self, layer: int, needed: Sequence[int]) -> None:
        """End the forecasts for a layer whose routing is now known. Called again if its routing changes later.

        Queued prefetches that the layer does not need are cancelled, and `running` becomes empty.
        """
        self.running.clear()
        self._first_used.clear()
        self._collect_arrived(needed)
        self._policies[layer].start_layer(layer, needed)
        requested = self._forecasts.pop(layer, None)
        if requested is None:
            return
        for key in set(requested).difference(needed) & self._forecast_keys:
            self._forecast_keys.discard(key)
            if not self._cancel(key) and not self.keep and key not in self.copies:
                self._free_slot(key)
        self._forecast_keys.difference_update(requested)

    def request(self, keys: Sequence[int], precision: Mapping[int, str] | None = None) -> tuple[int, int]:
        """Load experts of the running layer before all other copies. They are not evicted until :meth:`release`.

        Args:
            keys: distinct keys.
            precision: sufficient precision by key; other keys are loaded in full precision. An expert that is held in a
                lower precision than its entry is loaded again and counts as a miss.

        Returns:
            The number of keys without a slot, and of prefetched keys that are requested for the first time.
        """
        slots, copies, unused = self._slots, self.copies, self._unused
        self.running.update(keys)
        if precision:
            self._free_lower_precision(keys, precision)
        missing = [key for key in keys if key not in slots]
        for key in keys if copies else ():
            copy = copies.get(key)
            if copy is not None and not copy.done and not copy.urgent:
                self.link.promote(copy)
        first_used = unused.intersection(keys)
        if first_used:
            unused -= first_used
            self._first_used |= first_used
        moved = missing
        if self._streamed:
            moved = [*missing, *self._streamed.intersection(keys)]
            self._streamed.difference_update(moved)
        layer = keys[0] // self.experts
        count = self.stats.layers[layer]
        count.requests += len(keys)
        count.hits += len(keys) - len(moved)
        count.prefetched_used += len(first_used)
        if moved:
            count.misses += len(moved)
            count.collisions += len(self._evicted.intersection(moved))
        for key in self.link.in_order(missing) if missing else ():
            if not self._finds_room(layer, window=True):
                self._make_room(layer)
            self._load(key, True, FULL if precision is None else precision.get(key, FULL))
        return len(missing), len(first_used)

    def prefetch(self, keys: Sequence[int], *, streamed: bool = False) -> None:
        """Prefetch experts of one later layer, most needed first, until all remaining slots are protected.

        Args:
            keys: the experts.
            streamed: load most of a layer without a forecast; these copies count as misses.
        """
        if not keys:
            return
        self._collect_arrived(keys)
        slots, layer = self._slots, keys[0] // self.experts
        if self.observer is not None:
            self.observer.requested(layer, keys)
        policy = self._policies[layer]
        held = [key for key in keys if key in slots]
        self._forecast_keys.update(held)
        policy.touch(held)
        self._forecasts.setdefault(layer, []).extend(keys)
        for key in keys:
            if key in slots:
                continue
            if not self._finds_room(layer):
                return
            self._forecast_keys.add(key)
            self._load(key, False, streamed=streamed)

    def load_ahead(self, key: int) -> bool:
        """Load an expert of the window. It may evict an unprotected expert or one of the window's later layers.

        Returns:
            False if there was no such expert and no free slot.
        """
        if not self._finds_room(key // self.experts, window=True):
            return False
        self._load(key, False)
        return True

    def _finds_room(self, layer: int, *, window: bool = False) -> bool:
        """Return whether a slot is free, if need be by evicting an unprotected expert, or with `window` one of the
        window's later layers, the last layer of the group first."""
        groups = self._group_of
        if self._held[groups[layer]] < self._shares[groups[layer]]:
            return True
        victim = self.eviction.victim(layer, self._prefetch_protected, self._slots)
        if victim is None and window:
            later = (each for each in range(len(groups) - 1, layer, -1) if groups[each] == groups[layer])
            victim = self.window.victim(later, self._slots, self._demand_protected)
        if victim is None:
            return False
        self._evict(victim)
        return True

    def leave(self, keys: Sequence[int]) -> None:
        """Count experts of the running layer as misses that the host computes; cancel their queued copies."""
        for key in keys:
            self._cancel(key)
            count = self.stats.layers[key // self.experts]
            count.requests += 1
            count.misses += 1
            count.on_host += 1

    def adopt(self, key: int) -> None:
        """Load an expert that the host computes, behind all other copies, unless all slots are protected."""
        layer = key // self.experts
        if self._finds_room(layer):
            self._load(key, False, forecast=False)
            self._policies[layer].use([key])

    def cancel_prefetches(self, keys: Iterable[int]) -> None:
        """Cancel the queued prefetches among some keys, and free their slots."""
        for key in keys:
            if key in self._unused:
                self._cancel(key)

    def keep_full_only(self) -> None:
        """Free the slots of all experts in less than full precision, before exact passes. No layer may be running."""
        for key in list(self._packed):
            copy = self.copies.get(key)
            if copy is not None and not self._cancel(key):
                self._wait_for(key, copy, needed=False)
            if key in self._slots:
                self._free_slot(key)

    def free_up(self, layer: int, count: int, keep: Container[int]) -> None:
        """Evict experts in the policy's order, except those in `keep`, until `count` slots are free for the layer."""
        protected = _Union(self.running, self._forecast_keys, self.copies, keep)
        while self.free(layer) < count:
            victim = self.eviction.victim(layer, protected, self._slots)
            if victim is None:
                return
            self._evict(victim)

    def wait(self, keys: Sequence[int]) -> None:
        """Make compute wait for requested experts of one layer, and mark their slots as in use."""
        copies, just_used, layer = self.copies, self._first_used, keys[0] // self.experts
        if just_used:  # polled before the first wait, since more copies arrive during it
            in_time = 0
            for key in keys:
                if key in just_used:
                    just_used.remove(key)
                    copy = copies.get(key)
                    in_time += copy is None or self.link.poll(copy)
            self.stats.layers[layer].prefetched_in_time += in_time
        awaited = [key for key in reversed(keys) if key in copies] if copies else ()
        if awaited:
            start = self._clock()
            for key in awaited:  # most links end the copies of the last ones last
                self._wait_for(key, copies[key])
            self.count_wait(layer, self._clock() - start)
        self.link.check()
        self._policies[layer].use(keys)
        self.pool.mark(keys, SlotState.IN_USE)

    def release(self, keys: Sequence[int]) -> None:
        """End the use of experts, once compute that reads their slots has been launched."""
        slots = self._slots
        self.link.mark_read([slots[key] for key in keys])
        self.running.difference_update(keys)
        self.pool.mark(keys, SlotState.READY)
        if not self.keep:
            for key in keys:
                if key not in self._exempt:
                    self._free_slot(key)

    def abandon(self) -> None:
        """End the requests and forecasts of an interrupted forward pass."""
        self.pool.mark([key for key in self.running if key in self._slots and key not in self.copies], SlotState.READY)
        self.running.clear()
        self._first_used.clear()
        for key in list(self._forecast_keys):
            self._cancel(key)
        self._forecast_keys.clear()
        self._forecasts.clear()
        self.window.clear()
        if not self.keep:
            for key in [key for key in self._slots if key not in self.copies]:
                self._free_slot(key)

    def _free_lower_precision(self, keys: Sequence[int], precision: Mapping[int, str]) -> None:
        """Free the slots of experts that are needed in a better precision, unless they are in flight."""
        for key in keys:
            held = self._packed.get(key)
            if held is not None and key in precision and key not in self.copies and is_better(precision[key], held):
                self._free_slot(key)

    def _make_room(self, layer: int) -> None:
        """Make a slot free for an expert of the running layer where only protected ones could be evicted."""
        group = self._group_of[layer]
        for key in reversed(list(self.copies)):
            own = self._group_of[key // self.experts] == group
            if own and key not in self.running and self._cancel(key):
                return
        victim = self.eviction.victim(layer, self._demand_protected, self._slots)
        if victim is None:
            victim = self.eviction.victim(layer, self.running, self._slots)
            if victim is None:
                raise ExpertcastError(
                    f"eviction policy {self._policies[layer].name!r} gives no victim for layer {layer}, and not all "
                    "residents are protected"
                )
            self._wait_for(victim, self.copies[victim], needed=False)
        if victim in self._slots:  # its copy may have failed
            self._evict(victim)

    def _evict(self, key: int) -> None:
        """Free an expert's slot for another expert, and count the eviction."""
        self._evicted.add(key)
        self.stats.layers[key // self.experts].evicted += 1
        self._free_slot(key)

    def _collect_arrived(self, needed: Container[int] = ()) -> None:
        """Mark copies that have arrived, except those of the running layer, so that their slots can be reused.

        If `keep` is False, free the slots of arrived experts that no forecast, window or `needed` contains.
        """
        copies, running = self.copies, self.running
        if not copies:
            return
        self.link.progress()
        for key, copy in [entry for entry in copies.items() if entry[1].done and entry[0] not in running]:
            if copy.error is not None:
                del copies[key]
                self._free_slot(key)  # the layer's own request copies it again
                continue
            self._mark_arrived(key, copy)
            if not self.keep and key not in self._exempt and key not in needed:
                self._free_slot(key)

    def _load(
        self, key: int, urgent: bool, precision: str = FULL, *, streamed: bool = False, forecast: bool = True
    ) -> None:
        """Submit a copy into a free slot; `urgent`: for the running layer, otherwise a prefetch, or `streamed`, or with
        `forecast=False` neither."""
        link, layer = self.link, key // self.experts
        slot = self.pool.take(key, self._region_of[layer])
        self._held[self._group_of[layer]] += 1
        full = precision == FULL
        self._policies[layer].insert(key, full)
        try:
            if not full:
                self._packed[key] = precision
            nbytes = link.copy_bytes(key, precision)
            self.copies[key] = link.submit(key, slot, urgent=urgent, precision=precision)
        except BaseException:
            self._free_slot(key)
            raise
        if blocked_s := link.blocked_s:  # the link read or copied within `submit`
            self.count_wait(layer, blocked_s)
        count = self.stats.layers[layer]
        count.bytes_moved += nbytes
        if streamed:
            self._streamed.add(key)
        elif forecast and not urgent:
            self._unused.add(key)
            count.prefetched += 1
        if self.paced:
            self._busy_until_s = max(self._busy_until_s, self.link.clock()) + self._copy_s(nbytes)

    def _wait_for(self, key: int, copy: Transfer, *, needed: bool = True) -> None:
        """Wait for a copy. If it failed, free the slot, and raise the error if the expert is `needed`."""
        try:
            self.link.wait(copy)
        except Exception:
            self.running.discard(key)
            del self.copies[key]
            self._free_slot(key)
            if needed:
                raise
            return
        self._mark_arrived(key, copy)

    def _mark_arrived(self, key: int, copy: Transfer) -> None:
        del self.copies[key]
        if copy.precision != FULL:
            self.link.expand(copy)
        self.pool.arrived(key)

    def _cancel(self, key: int) -> bool:
        """Cancel an expert's copy and free the slot. Returns False if there is no copy or it has begun."""
        copy = self.copies.get(key)
        if copy is None or not self.link.cancel(copy):
            return False
        # a key that is not in `_unused` was requested by a layer whose routing then changed
        nbytes = self.link.copy_bytes(key, copy.precision)
        count = self.stats.layers[key // self.experts]
        count.bytes_moved -= nbytes
        if key in self._unused:
            count.prefetched -= 1
            count.dropped += 1
        if self.paced:
            self._busy_until_s -= self._copy_s(nbytes)
        del self.copies[key]
        self._free_slot(key)
        return True

    def _free_slot(self, key: int) -> None:
        """Free an expert's slot. Its copy must not be in flight."""
        layer = key // self.experts
        self._policies[layer].remove(key)
        self._held[self._group_of[layer]] -= 1
        self.pool.release(key)
        if self._packed:
            self._packed.pop(key, None)
        self._unused.discard(key)
        self._streamed.discard(key)
        self._forecast_keys.discard(key)
