"""Device memory for a few experts: S slots of one block each, shared by all layers.

S slots, E routed experts per layer. An expert's key is layer * E + expert.
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
"""Bytes. Direct reads of a disk need memory aligned to it."""


class SlotState(Enum):
    """State of a slot; see :meth:`SlotPool.mark` for the order."""

    FREE = "free"
    LOADING = "loading"
    READY = "ready"
    IN_USE = "in use"


_FREE, _LOADING, _READY, _IN_USE = SlotState
"""Globals, since they are looked up many times per layer: `SlotState.FREE` takes ten times as long."""


class SlotPool:
    """Device buffer divided into slots; each slot can hold any expert of any layer.

    The pool records the slot of each key and the state of each slot.
    :class:`expertcast.runtime.engine.cache.ExpertCache` decides which experts enter and leave.
    """

    def __init__(self, layout: BlockLayout, count: int, device: torch.device) -> None:
        self.layout = layout
        self.count = count
        self.device = with_index(device)
        self._buffer = _allocate(layout, count, self.device)
        self.views = layout.views(self._buffer)
        """Each parameter of the first layer as [S, ...], the shape that transformers' kernels take."""
        self.slots: dict[int, int] = {}
        """Slot of each key that has one; only `take`, `release` and `clear` change it."""
        self.clear()

    def clear(self) -> None:
        """Free all slots, whatever their states."""
        self.slots.clear()
        self._key_of: list[int | None] = [None] * self.count
        self._state = [_FREE] * self.count
        self.free_slots = list(range(self.count - 1, -1, -1))

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self._buffer.numel()

    def free(self) -> None:
        """Free the memory. A view held elsewhere keeps it allocated."""
        self.views.clear()
        self._buffer = self._buffer.new_empty(0)

    def views_of(self, layer: int) -> dict[str, Tensor]:
        """Return each parameter of a layer, [S, ...]."""
        return self.layout.views(self._buffer, layer) if self.layout.by_layer else self.views

    def block(self, slot: int) -> Tensor:
        """Return the memory of one slot, uint8 [block_bytes]."""
        size = self.layout.block_bytes
        return self._buffer[slot * size : (slot + 1) * size]

    def expand(self, slot: int, packed: PackedExperts) -> None:
        """Expand the packed copy in a slot's first bytes to the full block, on the current stream."""
        block = self.block(slot)
        packed.layout.expand(block[: packed.block_bytes], block)

    def key_of(self, slot: int) -> int | None:
        """Return the key of the expert in a slot; None if the slot is free."""
        return self._key_of[slot]

    def state(self, slot: int) -> SlotState:
        return self._state[slot]

    def resident(self) -> list[int]:
        """Return the keys that have a slot, those still loading included."""
        return list(self.slots)

    def take(self, key: int) -> int:
        """Assign a free slot to `key`, in state loading, and return it. A slot must be free."""
        assert key not in self.slots, f"expert {key} has a slot already"
        slot = self.free_slots.pop()
        assert self._state[slot] is _FREE
        self.slots[key] = slot
        self._key_of[slot] = key
        self._state[slot] = _LOADING
        return slot

    def arrived(self, key: int) -> None:
        """Mark a key's slot as ready, once its copy has arrived."""
        self._state[self.slots[key]] = _READY

    def mark(self, keys: Iterable[int], state: SlotState) -> None:
        """Set the state of some keys' slots (ready -> in use -> ready)."""
        slots, states = self.slots, self._state
        for key in keys:
            states[slots[key]] = state

    def release(self, key: int) -> None:
        """Free a key's slot, which must not be in use."""
        slot = self.slots.pop(key)
        assert self._state[slot] is not _IN_USE, f"slot {slot} is in use"
        self._key_of[slot] = None
        self._state[slot] = _FREE
        self.free_slots.append(slot)


def _allocate(layout: BlockLayout, count: int, device: torch.device) -> Tensor:
    """Allocate zeroed memory, uint8 [count * block_bytes], aligned to 4096 bytes."""
    nbytes = count * layout.block_bytes
    try:
        if device.type == "cpu":
            # zeroing commits the pages; leaving that to the disk's threads doubled the time of the first prompt
            return HostMemory(nbytes).bytes.zero_()
        raw = torch.zeros(nbytes + _PAGE, dtype=torch.uint8, device=device)
    except (torch.OutOfMemoryError, ExpertcastError) as error:
        raise ExpertcastError(
            f"slots={count} need {nbytes / 1e9:.3g} GB, which {device} cannot allocate ({layout.block_bytes} bytes per "
            "slot): give fewer slots, or set memory=... to the free memory"
        ) from error
    start = -raw.data_ptr() % _PAGE
    return raw[start : start + nbytes]
