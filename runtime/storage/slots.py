"""Device memory for a few experts: S slots of one block each, shared by all layers whose blocks have one size.

S slots, E routed experts per layer. An expert's key is layer * E + expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import accumulate

import torch
from torch import Tensor

from expertcast.data.machine import with_index
from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.storage.layout import BlockLayout, Region
from expertcast.runtime.storage.memory import HostMemory, commit
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
    """Device buffer divided into slots; each slot can hold any expert of the layers of its region.

    The pool records the slot of each key and the state of each slot.
    :class:`expertcast.runtime.engine.cache.ExpertCache` decides which experts enter and leave.

    Args:
        layout: layout of an expert.
        count: number of slots, S.
        device: where they are.
        regions: of the slots, those of larger blocks first; empty: one region for all layers.
    """

    def __init__(self, layout: BlockLayout, count: int, device: torch.device, regions: Sequence[Region] = ()) -> None:
        self.layout = layout
        self.count = count
        self.device = with_index(device)
        self._regions = regions or [Region((), count, layout.block_bytes)]
        nbytes = sum(region.slots * region.block_bytes for region in self._regions)
        self._buffer = _allocate(nbytes, count, self.device)  # before anything as long as the slots
        self._region_of = [number for number, region in enumerate(self._regions) for _ in range(region.slots)]
        """Region of each slot."""
        self._starts = list(accumulate((self._regions[number].block_bytes for number in self._region_of), initial=0))
        """First byte of each slot, and the end of the last one."""
        self._blocks: dict[int, Tensor] = {}
        self.views = self.views_of(0)
        """Each parameter of the first layer as [S, ...], the shape that transformers' kernels take."""
        self.slots: dict[int, int] = {}
        """Slot of each key that has one; only `take`, `release` and `clear` change it."""
        self.clear()

    def clear(self) -> None:
        """Free all slots, whatever their states."""
        self.slots.clear()
        self._key_of: list[int | None] = [None] * self.count
        self._state = [_FREE] * self.count
        self.free_slots: list[list[int]] = [[] for _ in self._regions]
        """Free slots of each region."""
        for slot in reversed(range(self.count)):
            self.free_slots[self._region_of[slot]].append(slot)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self._buffer.numel()

    def free(self) -> None:
        """Free the memory. A view held elsewhere keeps it allocated."""
        self.views.clear()
        self._blocks.clear()
        self._buffer = self._buffer.new_empty(0)

    def region_of(self, layer: int) -> int:
        """Return the number of a layer's region."""
        return next((number for number, region in enumerate(self._regions) if layer in region.layers), 0)

    def views_of(self, layer: int) -> dict[str, Tensor]:
        """Return each parameter of a layer by slot, [S, ...], up to the last slot of its region.

        Views of other regions' slots are meaningless. They lie in the buffer, since slots before are no smaller.
        """
        number = self.region_of(layer)
        first, size = self._region_of.index(number), self._regions[number].block_bytes
        last = first + self._regions[number].slots
        start = self._starts[first] - first * size
        return self.layout.views(self._buffer[start : start + last * size], layer, size)

    def block(self, slot: int) -> Tensor:
        """Return the memory of one slot, uint8 [bytes of its region's blocks]."""
        block = self._blocks.get(slot)
        if block is None:
            block = self._blocks[slot] = self._buffer[self._starts[slot] : self._starts[slot + 1]]
        return block

    def expand(self, slot: int, packed: PackedExperts) -> None:
        """Expand the packed copy in a slot's first bytes to the full block, on the current stream."""
        block = self.block(slot)
        packed.layout.expand(block[: packed.block_bytes], block)

    def key_of(self, slot: int) -> int | None:
        """Return the key of the expert in a slot; None if the slot is free."""
        return self._key_of[slot]

    def state(self, slot: int) -> SlotState:
        return self._state[slot]

    def take(self, key: int, region: int = 0) -> int:
        """Assign a region's free slot to `key`, in state loading, and return it. A slot must be free."""
        assert key not in self.slots, f"expert {key} has a slot already"
        slot = self.free_slots[region].pop()
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
        self.free_slots[self._region_of[slot]].append(slot)


def _allocate(nbytes: int, count: int, device: torch.device) -> Tensor:
    """Allocate zeroed memory for `count` slots, uint8 [nbytes], aligned to 4096 bytes."""
    try:
        if device.type == "cpu":
            memory = HostMemory(nbytes).bytes
            commit(memory)
            return memory
        raw = torch.zeros(nbytes + _PAGE, dtype=torch.uint8, device=device)
    except (torch.OutOfMemoryError, ExpertcastError) as error:
        raise ExpertcastError(
            f"slots={count} need {nbytes / 1e9:.3g} GB, which {device} cannot allocate ({nbytes // count} bytes per "
            "slot): give fewer slots, or set memory=... to the free memory"
        ) from error
    start = -raw.data_ptr() % _PAGE
    return raw[start : start + nbytes]
