"""Which expert lies in which slot, kept in tensors: least recently used, no host round trip, static shapes.

The rules are those of :class:`expertcast.runtime.engine.residency.Residency` with an LRU policy, written so that a
decode step can be captured in a CUDA graph: every table has one row more than it needs, where whatever does not
apply is written.

L MoE layers, E routed experts per layer, T tokens, K experts per token, S slots, N candidates of one call (the T x K
ids of a small step, or all E experts of the layer). An expert's key is layer * E + expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

FEW_IDS = 64
"""Up to so many ids are compared with each other; more are counted in a row of all experts."""

COUNTS = ("requests", "hits", "misses", "prefetched", "prefetched_used", "steps", "chunks")
_REQUESTS, _HITS, _MISSES, _PREFETCHED, _USED, _STEPS, _CHUNKS = range(len(COUNTS))


class Moves(NamedTuple):
    """Copies to make: block of `keys_N` into `slots_N` wherever `moved_N`."""

    keys_N: Tensor
    slots_N: Tensor
    moved_N: Tensor


@dataclass(frozen=True, slots=True)
class _Candidates:
    keys_N: Tensor
    needed_N: Tensor
    """Each distinct key once."""


class DeviceResidency:
    """Tables on the device; all calls come on the stream that computes.

    Nothing here looks at a value on the host. What :meth:`bring` and :meth:`expect` return must be copied before a
    kernel reads the slots, and before the next call's copies.

    Args:
        layers: L.
        experts: E.
        slots: S.
        device: where slots and tables are.
    """

    def __init__(self, *, layers: int, experts: int, slots: int, device: torch.device) -> None:
        self.slots = slots
        self._layers, self._experts, self._device = layers, experts, device
        self._nowhere = layers * experts
        """Row of `slot_of` for keys that do not exist; row `slots` of the others for slots that do not."""
        self.slot_of = torch.full((layers * experts + 1,), -1, dtype=torch.int64, device=device)
        self.key_of = torch.full((slots + 1,), -1, dtype=torch.int64, device=device)
        self.used_at = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self._unused = torch.zeros(slots + 1, dtype=torch.bool, device=device)
        """Prefetched into this slot, not requested so far."""
        self._tick = torch.zeros((), dtype=torch.int64, device=device)
        self.counts = torch.zeros(layers, len(COUNTS), dtype=torch.int64, device=device)
        self._arange = torch.arange(max(FEW_IDS, experts), device=device)
        self._when_free = torch.arange(-slots - 1, 0, device=device)
        """Before any tick: free slots are taken first, and in order."""
        self.clear()

    def clear(self) -> None:
        """Forget what lies where."""
        self.slot_of.fill_(-1)
        self.key_of.fill_(-1)
        self._unused.fill_(False)
        self._tick.fill_(1)
        self.used_at.copy_(self._when_free)

    def width(self, ids_TK: Tensor) -> int:
        """The most distinct experts that some ids can name."""
        return min(ids_TK.numel(), self._experts)

    def bring(self, layer: int, ids_TK: Tensor, within_E: Tensor | None = None) -> Moves:
        """A layer runs with these experts: hits become the most recently used, misses replace the least.

        Args:
            ids_TK: at most S distinct experts.
            within_E: bool [E], only these count (a chunk of a step that does not fit).
        """
        chosen = self._candidates(layer, ids_TK, within_E)
        slots_N = self.slot_of[chosen.keys_N]
        hit_N = chosen.needed_N & (slots_N >= 0)
        missing_N = chosen.needed_N & (slots_N < 0)
        used_N = hit_N & self._unused[slots_N]
        moves = self._place(chosen.keys_N, slots_N, hit_N, missing_N, unused=False)
        count = self.counts[layer]
        count[_REQUESTS] += chosen.needed_N.sum()
        count[_HITS] += hit_N.sum()
        count[_MISSES] += missing_N.sum()
        count[_USED] += used_N.sum()
        count[_CHUNKS] += 1
        return moves

    def expect(self, layer: int, ids_N: Tensor, running: int) -> Moves:
        """A later layer is forecast to need these experts, most needed first; those without room are left out.

        More than `FEW_IDS` ids are taken in the order of their numbers.

        Args:
            running: slots that the layer which runs now may need; they are not given up.
        """
        chosen = self._candidates(layer, ids_N, None)
        slots_N = self.slot_of[chosen.keys_N]
        hit_N = chosen.needed_N & (slots_N >= 0)
        missing_N = chosen.needed_N & (slots_N < 0)
        missing_N &= missing_N.cumsum(0) <= self.slots - running - hit_N.sum()
        moves = self._place(chosen.keys_N, slots_N, hit_N, missing_N, unused=True)
        self.counts[layer, _PREFETCHED] += missing_N.sum()
        return moves

    def slots_for(self, layer: int, ids_TK: Tensor) -> Tensor:
        """Slot of each id's expert, -1 where it has none."""
        return self.slot_of[layer * self._experts + ids_TK]

    def finish(self, layer: int, *, keep: bool) -> None:
        """A step of the layer has been launched; `keep=False` gives the slots of all its experts back."""
        self.counts[layer, _STEPS] += 1
        if keep:
            return
        first = layer * self._experts
        own_S = (self.key_of >= first) & (self.key_of < first + self._experts)
        self.slot_of[first : first + self._experts] = -1
        self.key_of.masked_fill_(own_S, -1)
        self.used_at.copy_(torch.where(own_S, self._when_free, self.used_at))

    def _candidates(self, layer: int, ids: Tensor, within_E: Tensor | None) -> _Candidates:
        first = layer * self._experts
        if within_E is None and ids.numel() <= FEW_IDS:
            ids_N = ids.reshape(-1)
            again_N = (ids_N[:, None] == ids_N[None, :]).tril(-1).any(1)
            return _Candidates(first + ids_N, ~again_N)
        needed_E = torch.zeros(self._experts, dtype=torch.bool, device=self._device)
        needed_E.scatter_(0, ids.reshape(-1), True)
        if within_E is not None:
            needed_E &= within_E
        return _Candidates(first + self._arange[: self._experts], needed_E)

    def _place(self, keys_N: Tensor, slots_N: Tensor, hit_N: Tensor, missing_N: Tensor, *, unused: bool) -> Moves:
        """Refresh hits, give the least recently used slots to the missing, in order."""
        count = keys_N.shape[0]
        order_N = self._tick + self._arange[:count]
        self._tick += count
        self.used_at.scatter_(0, torch.where(hit_N, slots_N, self.slots), order_N)
        oldest_N = self.used_at[: self.slots].topk(min(count, self.slots), largest=False, sorted=True).indices
        victim_N = oldest_N[(missing_N.cumsum(0) - 1).clamp(0, oldest_N.shape[0] - 1)]
        target_N = torch.where(missing_N, victim_N, self.slots)
        lost_N = torch.where(missing_N, self.key_of[victim_N], -1)
        self.slot_of.scatter_(0, torch.where(lost_N >= 0, lost_N, self._nowhere), -1)
        self.slot_of.scatter_(0, torch.where(missing_N, keys_N, self._nowhere), victim_N)
        self.key_of.scatter_(0, target_N, keys_N)
        self.used_at.scatter_(0, target_N, order_N)
        # a forecast leaves a hit as it was: prefetched before and unused, or in use
        touched_N = target_N if unused else torch.where(hit_N, slots_N, target_N)
        self._unused.scatter_(0, touched_N, unused)
        return Moves(keys_N, victim_N, missing_N)


class KernelResidency(DeviceResidency):
    """The same tables, a small call's update done by one Triton kernel in place of some forty of torch's."""

    def __init__(self, *, layers: int, experts: int, slots: int, device: torch.device) -> None:
        super().__init__(layers=layers, experts=experts, slots=slots, device=device)
        from expertcast.runtime.links.triton_kernels import place

        self._kernel = place

    def bring(self, layer: int, ids_TK: Tensor, within_E: Tensor | None = None) -> Moves:
        if within_E is not None or ids_TK.numel() > FEW_IDS:
            return super().bring(layer, ids_TK, within_E)
        return self._launch(layer, ids_TK, room=self.slots, forecast=False)

    def expect(self, layer: int, ids_N: Tensor, running: int) -> Moves:
        if ids_N.numel() > FEW_IDS:
            return super().expect(layer, ids_N, running)
        return self._launch(layer, ids_N, room=self.slots - running, forecast=True)

    def _launch(self, layer: int, ids: Tensor, *, room: int, forecast: bool) -> Moves:
        count = ids.numel()
        keys_N, slots_N = torch.empty(2, count, dtype=torch.int64, device=self._device)
        moved_N = torch.empty(count, dtype=torch.bool, device=self._device)
        # Triton launches on the current device, whatever the tensors say
        with torch.cuda.device_of(self.slot_of):  # type: ignore[no-untyped-call]
            self._kernel[(1,)](
                ids.contiguous(), self.slot_of, self.key_of, self.used_at, self._unused, self._tick, self.counts,
                keys_N, slots_N, moved_N, layer, room,
                N=count, PADDED_N=_power_of_two(count), S=self.slots, PADDED_S=_power_of_two(self.slots),
                E=self._experts, COLUMNS=len(COUNTS), FORECAST=forecast,
            )  # fmt: skip
        return Moves(keys_N, slots_N, moved_N)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
