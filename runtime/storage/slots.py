"""Device memory for a few experts: S slots of one block each, shared by all layers.

S slots. An expert's key is layer * E + expert.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import torch
from torch import Tensor

from expertcast.data.machine import with_index
from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.storage.layout import BlockLayout
from expertcast.runtime.storage.memory import HostMemory
from expertcast.runtime.storage.packed import PackedExperts

_PAGE = 4096
"""Bytes: a disk is read directly into memory that begins at a multiple of it."""


class SlotState(Enum):
    """State of a slot; see :meth:`SlotPool.mark` for the order."""

    FREE = "free"
    LOADING = "loading"
    READY = "ready"
    IN_USE = "in use"


_FREE, _LOADING, _READY, _IN_USE = SlotState
"""Looked up many times per layer: a member of an enumeration takes ten times as long as a global."""


class SlotPool:
    """One buffer on the device; any expert of any layer may lie in any slot.

    The pool records the slot of each key and the state of each slot.
    :class:`expertcast.runtime.engine.cache.ExpertCache` decides which experts enter and leave.
    """

    def __init__(self, layout: BlockLayout, count: int, device: torch.device) -> None:
        self.layout = layout
        self.count = count
        self.device = with_index(device)
        self._buffer = _allocate(layout, count, self.device)
        self.views = layout.views(self._buffer)
        """Each parameter of the first layer, [S, ...] in the shape transformers' kernels take."""
        self.slots: dict[int, int] = {}
        """Slot of each key that has one; changed by `take`, `release` and `clear` only."""
        self.clear()

    def clear(self) -> None:
        """All slots are free."""
        self.slots.clear()
        self._key_of: list[int | None] = [None] * self.count
        self._state = [_FREE] * self.count
        self.free_slots = list(range(self.count - 1, -1, -1))

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self._buffer.numel()

    def free(self) -> None:
        """Give the memory back, as far as no other object holds a view of it."""
        self.views.clear()
        self._buffer = self._buffer.new_empty(0)

    def views_of(self, layer: int) -> dict[str, Tensor]:
        """Return each parameter of a layer, [S, ...]."""
        return self.layout.views(self._buffer, layer) if self.layout.by_layer else self.views

    def block(self, slot: int) -> Tensor:
        """uint8 [block_bytes] of one slot."""
        size = self.layout.block_bytes
        return self._buffer[slot * size : (slot + 1) * size]

    def expand(self, slot: int, packed: PackedExperts) -> None:
        """A packed copy lies in a slot's first bytes: make it the full block, on the current stream."""
        block = self.block(slot)
        packed.layout.expand(block[: packed.block_bytes], block)

    def key_of(self, slot: int) -> int | None:
        """The expert that has this slot."""
        return self._key_of[slot]

    def state(self, slot: int) -> SlotState:
        """Return the state of this slot."""
        return self._state[slot]

    def resident(self) -> list[int]:
        """Keys that have a slot, loading ones included."""
        return list(self.slots)

    def take(self, key: int) -> int:
        """Give `key` a free slot, loading. There must be one."""
        assert key not in self.slots, f"expert {key} has a slot already"
        slot = self.free_slots.pop()
        assert self._state[slot] is _FREE
        self.slots[key] = slot
        self._key_of[slot] = key
        self._state[slot] = _LOADING
        return slot

    def arrived(self, key: int) -> None:
        """An expert's copy has come (loading -> ready)."""
        self._state[self.slots[key]] = _READY

    def mark(self, keys: Iterable[int], state: SlotState) -> None:
        """Move the slots of some keys to another state (ready -> in use -> ready)."""
        slots, states = self.slots, self._state
        for key in keys:
            states[slots[key]] = state

    def release(self, key: int) -> None:
        """Free a key's slot. A slot in use is never freed."""
        slot = self.slots.pop(key)
        assert self._state[slot] is not _IN_USE, f"slot {slot} is in use"
        self._key_of[slot] = None
        self._state[slot] = _FREE
        self.free_slots.append(slot)


def _allocate(layout: BlockLayout, count: int, device: torch.device) -> Tensor:
    """Zeroed uint8 [count * block_bytes] whose first byte lies at a multiple of 4096."""
    nbytes = count * layout.block_bytes
    try:
        if device.type == "cpu":
            # zeroed now: pages that the disk's threads are the first to touch doubled the time of the first prompt
            return HostMemory(nbytes).bytes.zero_()
        raw = torch.zeros(nbytes + _PAGE, dtype=torch.uint8, device=device)
    except (torch.OutOfMemoryError, ExpertcastError) as error:
        raise ExpertcastError(
            f"slots={count} need {nbytes / 1e9:.3g} GB, which {device} cannot allocate ({layout.block_bytes} bytes per "
            "slot): give fewer slots, or set memory=... to the memory that is free"
        ) from error
    start = -raw.data_ptr() % _PAGE
    return raw[start : start + nbytes]
