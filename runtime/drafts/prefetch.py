"""Prefetch for verification: load experts while a draft runs and during the exact pass.

The routers of a draft predict the experts that the exact pass over its tokens will need. They go into the lookahead
buffer, and absent experts are loaded, those of the first layers first. The number of loads depends on the number of
copies that the link completes during one draft pass, as measured last:

    priming       first drafted token: at most half of this number, confident entries first
    guided        further drafted tokens: at most this number, confident entries first
    saturation    after drafting: all remaining entries; during the exact pass those of the layers after the running one

L MoE layers, E routed experts per layer, K experts per token, T tokens, N positions. The key of an expert is
layer * E + expert.

Source: MoE-SpeQ (lookahead buffer and phases).
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence

import torch
from torch import Tensor

from expertcast.data.batch import RouterCall
from expertcast.predictors.view import ModelShape
from expertcast.runtime.engine.cache import ExpertCache
from expertcast.runtime.links.driver import Readback


class LookaheadBuffer:
    """Counts of distinct experts by position of the drafted tokens.

    Position 0 has the experts of the last settled tokens, position i those of the i-th drafted token. A draft of n
    passes fills n positions; the experts of the last drafted token are unknown until it is verified.

    Args:
        slots: number of slots.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._keys: set[int] = set()
        self._distinct: list[int] = []
        """Number of keys that appear at no earlier position [N]."""
        self._new: list[int] = []
        """Number of these keys that were absent [N]."""

    def put(self, position: int, keys: Iterable[int], held: Container[int]) -> None:
        """Add the experts of one layer of a draft pass; a key counts at its first position only.

        Args:
            position: position of the tokens that were fed; at most one more than the last position.
            keys: keys of the experts, possibly repeated.
            held: keys of experts that have a slot.
        """
        if position == len(self._distinct):
            self._distinct.append(0)
            self._new.append(0)
        for key in keys:
            if key not in self._keys:
                self._keys.add(key)
                self._distinct[position] += 1
                self._new[position] += key not in held

    def clear(self) -> None:
        """Remove all entries, at the start of a cycle."""
        self._keys.clear()
        self._distinct.clear()
        self._new.clear()

    @property
    def positions(self) -> int:
        """Number of positions with an entry, N."""
        return len(self._distinct)

    @property
    def growth(self) -> list[int]:
        """Number of copies by position [N]: absent experts, plus residents that must be loaded again because the slots
        do not hold all distinct experts until their layer runs."""
        distinct = new = over = 0
        found = []
        for own, fresh in zip(self._distinct, self._new, strict=True):
            distinct, new, before = distinct + own, new + fresh, over
            over = min(distinct - new, max(0, distinct - self._slots))
            found.append(fresh + over - before)
        return found


def _ordered(call: RouterCall) -> Tensor:
    """Return the chosen experts [T, K] by falling weight."""
    return call.ids_TK.gather(1, call.weights_TK.argsort(dim=1, descending=True, stable=True))


CONFIDENT = 0.5
"""Minimum combine weight of a confident entry, as a multiple of the mean weight 1 / K of its token."""
_PRIMING, _GUIDED = 0.5, 1.0
"""Number of loads in the phases, as a multiple of the copies that the link completes during a draft pass."""


class Schedule:
    """Fills the lookahead buffer and loads its experts.

    Args:
        residency: cache of the experts; the schedule owns its window.
        shape: shape of the model.
    """

    def __init__(self, residency: ExpertCache, shape: ModelShape) -> None:
        self._residency, self._window = residency, residency.window
        self._link = residency.link
        self._readback = Readback(self._link.driver, self._link.progress)
        self._layers, self._experts = shape.layers, shape.experts
        self.buffer = LookaheadBuffer(residency.pool.count)
        """Experts of the current cycle."""
        self._drafted: list[list[Tensor]] = [[] for _ in range(shape.layers)]
        """By layer: experts [B * columns, K] of each draft pass of the current cycle, by falling weight."""
        self.matches = [0, 0, 0]
        """Pairs of a position and a layer in this cycle: those where draft and exact pass choose the same experts in
        the same order, the same set, and all."""
        self._confident: list[list[int]] = [[] for _ in range(shape.layers)]
        self._rest: list[list[int]] = [[] for _ in range(shape.layers)]
        self._nearest = shape.layers
        self.position: int | None = None
        """Position that the current draft pass feeds; None: no draft pass runs."""
        self.verifies = False
        """Whether the exact pass of a draft runs."""
        self._waiting: list[RouterCall] = []
        """Router calls of the current draft pass whose routing is still on the device."""
        self._begun = self._pass_s = 0.0
        """Start time of the current draft pass, and seconds of the previous one."""
        self._room = 0.0
        """Number of loads that the current phase still allows."""

    def begin(self) -> None:
        """Start a cycle."""
        self.stop()
        self.buffer.clear()
        self.matches = [0, 0, 0]
        for drafted in self._drafted:
            drafted.clear()

    def draft(self, position: int) -> None:
        """Start the draft pass that feeds a position (0: the first)."""
        self.position, self._begun = position, self._link.clock()
        copies = (_GUIDED if position else _PRIMING) * self._pass_s / max(self._link.copy_s, 1e-9)
        in_flight = 0 if self._residency.idle else len(self._residency.copies)
        self._room = 1 + int(copies) - in_flight

    def drafted(self) -> None:
        """End the draft pass; on a device this copies the routing of all layers to the host at once."""
        if self._waiting and self.position is not None:
            routing = [torch.cat([call.ids_TK.float(), call.weights_TK.float()], dim=1) for call in self._waiting]
            for call, rows in zip(self._waiting, self._readback.start(torch.stack(routing)).tolist(), strict=True):
                top_k = call.ids_TK.shape[1]
                ids = [[int(expert) for expert in row[:top_k]] for row in rows]
                self._put(self.position, call.layer, ids, [row[top_k:] for row in rows])
        self._waiting.clear()
        self.position, self._pass_s = None, self._link.clock() - self._begun
        self.load()

    def verify(self) -> None:
        """Start the exact pass."""
        self.position, self.verifies = None, True
        self._room = math.inf
        self.load()

    def end(self) -> None:
        """End the cycle and cancel the remaining loads."""
        self._residency.cancel_prefetches(list(self._window.keys))
        self.stop()

    def routed(self, call: RouterCall) -> None:
        """Add the experts of a draft pass's layer to the buffer."""
        if self.verifies:
            self._compare(call)
        if self.position is None:
            return
        self._drafted[call.layer].append(_ordered(call))
        if self._link.driver is None:
            self._put(self.position, call.layer, call.ids_TK.tolist(), call.weights_TK.tolist())
            self.load()
        else:
            self._waiting.append(call)

    def _compare(self, call: RouterCall) -> None:
        """Compare the exact pass with the draft at the positions that both ran, all but the last of each row."""
        drafted, top_k = self._drafted[call.layer], call.ids_TK.shape[1]
        rows = len(call.ids_TK) - sum(map(len, drafted))
        if not drafted or rows <= 0:
            return
        drafted_BNK = torch.cat([each.view(rows, -1, top_k) for each in drafted], dim=1)
        exact_BNK = _ordered(call).view(rows, -1, top_k)[:, :-1]
        hard_BN = (drafted_BNK == exact_BNK).all(dim=2)
        exact_set_BN = (drafted_BNK.sort(dim=2).values == exact_BNK.sort(dim=2).values).all(dim=2)
        found = torch.stack([hard_BN.sum(), exact_set_BN.sum()]).tolist()
        self.matches = [a + b for a, b in zip(self.matches, [*found, hard_BN.numel()], strict=True)]

    def reached(self, layer: int, keys: Sequence[int]) -> None:
        """Cancel loads of a layer that the exact pass has reached, except those of `keys`."""
        if self.verifies:
            self._confident[layer].clear()
            self._rest[layer].clear()
            self._residency.cancel_prefetches(self._window.pop(layer).difference(keys))

    def load(self) -> None:
        """Load as many entries as the current phase allows."""
        if not self._link.overlaps or self._nearest >= self._layers:
            return
        residency = self._residency
        for pending in (self._confident, self._rest):
            layer = self._nearest
            while self._room > 0 and layer < self._layers:
                if not pending[layer]:
                    layer += 1
                    continue
                key = pending[layer][-1]
                if key not in residency.pool.slots:
                    if not residency.load_ahead(key):
                        return
                    self._room -= 1
                pending[layer].pop()
            if self._room <= 0:
                return
        self._nearest = self._layers  # no entries are left

    def _put(self, position: int, layer: int, ids: list[list[int]], weights: list[list[float]]) -> None:
        first, slots, window = layer * self._experts, self._residency.pool.slots, self._window
        self.buffer.put(position, (first + expert for row in ids for expert in row), slots)
        for row, values in zip(ids, weights, strict=True):
            least = CONFIDENT * sum(values) / len(values)
            for expert, weight in zip(row, values, strict=True):
                key = first + expert
                if key in window.keys:
                    continue
                window.add(key)
                if key not in slots:
                    (self._confident if weight >= least else self._rest)[layer].append(key)
                    if layer < self._nearest:
                        self._nearest = layer

    def stop(self) -> None:
        """Stop loading; copies in flight may finish."""
        self._window.clear()
        self._waiting.clear()
        for pending in (*self._confident, *self._rest):
            pending.clear()
        self._nearest, self.position, self.verifies = self._layers, None, False
