"""Who has a slot, what is on its way, and what is needed: the books that :mod:`.residency` keeps its rules by.

E routed experts per layer. An expert's key is layer * E + expert.
"""

from __future__ import annotations

from collections.abc import Container

from expertcast.runtime.links.base import Copy
from expertcast.runtime.policies.scope import Eviction
from expertcast.runtime.storage.precision import FULL
from expertcast.runtime.storage.slots import SlotPool


class Books:
    """Sets of keys, and the two events that change who has a slot: :meth:`take` and :meth:`lose`.

    Args:
        pool: the slots.
        eviction: is told who gets and loses a slot; says how many slots a layer may use.
        experts: E.
    """

    def __init__(self, pool: SlotPool, eviction: Eviction, experts: int) -> None:
        self.pool, self.eviction, self.experts = pool, eviction, experts
        self.slots = pool.slots
        """Slot of each expert that has one, arrived or not."""
        self.policies = eviction.by_layer
        self.shares = eviction.shares
        """Slots of each layer; None: all slots are everybody's."""
        self._held_by = [0] * len(eviction.by_layer)
        """Slots that each layer's experts have; kept only where layers have shares."""
        self.copies: dict[int, Copy] = {}
        """Copies not known to have arrived."""
        self.packed: dict[int, str] = {}
        """Precision of the experts that are held, or on their way, in less than the full one."""
        self.running: set[int] = set()
        """Requested by the running layer, which has not computed with them so far."""
        self.wanted: set[int] = set()
        """Asked for by an outstanding forecast, and with a slot."""
        self.asked: dict[int, list[int]] = {}
        """The same by layer, in the order they were asked for; may name keys that lost their slot since."""
        self.unused: set[int] = set()
        """Prefetched, not requested so far."""
        self.just_used: set[int] = set()
        """Prefetched, requested by the running layer for the first time."""
        self.given_up: set[int] = set()
        """Evicted for another expert's sake in this pass."""
        self.needed = Union(self.running, self.wanted, self.copies)
        """What a forecast's expert may not push out."""
        self.needed_now = Union(self.running, self.copies)
        """What a running layer's expert pushes out last."""

    def holds(self, key: int) -> bool:
        """Whether the expert has a slot, arrived or not."""
        return key in self.slots

    def held(self, layer: int) -> dict[int, str]:
        """The layer's experts (0..E-1) that have a slot, with the precision of what is or will be in it."""
        first, slots, packed = layer * self.experts, self.slots, self.packed
        return {expert: packed.get(first + expert, FULL) for expert in range(self.experts) if first + expert in slots}

    def limit(self, layer: int) -> int:
        """Most experts of a layer that can have a slot at once."""
        return self.pool.count if self.shares is None else self.shares[layer]

    def free(self, layer: int) -> int:
        """Free slots that the layer's experts may take."""
        return len(self.pool.free_slots) if self.shares is None else self.shares[layer] - self._held_by[layer]

    def take(self, key: int, precision: str) -> int:
        """Give the expert a free slot, which is returned, for a copy in this precision."""
        slot = self.pool.take(key)
        layer = key // self.experts
        if self.shares is not None:
            self._held_by[layer] += 1
        full = precision == FULL
        if not full:
            self.packed[key] = precision
        self.policies[layer].insert(key, full)
        return slot

    def lose(self, key: int) -> None:
        """The expert's slot is free, for whatever reason; no copy of it may be under way."""
        layer = key // self.experts
        self.policies[layer].remove(key)
        if self.shares is not None:
            self._held_by[layer] -= 1
        self.pool.release(key)
        self.packed.pop(key, None)
        self.unused.discard(key)
        self.wanted.discard(key)

    def clear(self) -> None:
        """No expert has a slot, and none is needed."""
        self.pool.clear()
        self.eviction.clear()
        self._held_by = [0] * len(self._held_by)
        for held in (
            self.copies, self.packed, self.running, self.wanted, self.asked, self.unused, self.just_used, self.given_up
        ):  # fmt: skip
            held.clear()


class Union:
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
