"""Loads what a verification will need while its tokens are drafted, and goes on while it runs.

A draft's routers name the experts that the exact pass over its tokens will need: they go into the lookahead buffer, and
what has no slot is asked for, nearest layer first, for that one's turn comes first. Three phases, by the copies that
the link brings while one pass drafts, as both were measured last:

priming       the first token is drafted: half of them at most, confident entries first
guided        the further ones: all of them, confident entries first
saturation    drafting has ended: everything that is left, and while the exact pass runs what comes after its layer

L MoE layers, E routed experts per layer, K experts per token, T tokens. A key is layer * E + expert.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence

import torch

from expertcast.data.batch import RouterCall
from expertcast.predictors.view import ModelShape
from expertcast.runtime.engine.cache import ExpertCache
from expertcast.runtime.links.driver import Readback


class LookaheadBuffer:
    """Counts the distinct experts that drafted tokens were routed to, by position (row C8).

    Position 0 is what verification feeds first, the last tokens that are certain; position i is the i-th drafted token.
    A draft of n passes fills n positions: what the last drafted token needs nobody knows before it is verified.

    Args:
        slots: experts that fit on the device.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._keys: set[int] = set()
        self._distinct: list[int] = []
        """[N] keys that stand at no earlier position."""
        self._new: list[int] = []
        """[N] of these, the keys that were not held."""

    def put(self, position: int, keys: Iterable[int], held: Container[int]) -> None:
        """A layer of a draft pass was routed. A key counts where it is put first.

        Args:
            position: of the tokens that were fed; positions come in order, none is left out.
            keys: of the experts, repeated or not.
            held: keys that have a slot, or are on their way for another reason than this buffer.
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
        """A new cycle begins."""
        self._keys.clear()
        self._distinct.clear()
        self._new.clear()

    @property
    def positions(self) -> int:
        """N: positions that have an entry."""
        return len(self._distinct)

    @property
    def growth(self) -> list[int]:
        """[N] copies by position: new experts, and those of the others that the slots cannot keep beside them until
        their layer's turn, and that come again."""
        distinct = new = over = 0
        found = []
        for own, fresh in zip(self._distinct, self._new, strict=True):
            distinct, new, before = distinct + own, new + fresh, over
            over = min(distinct - new, max(0, distinct - self._slots))
            found.append(fresh + over - before)
        return found


CONFIDENT = 0.5
"""An entry is confident whose share of its token's combine weights is at least so much of a mean one's, 1 / K."""
_PRIMING, _GUIDED = 0.5, 1.0
"""Share of the link's copies in a draft pass that are asked for."""


class Schedule:
    """Fills the buffer and asks for what is in it.

    Args:
        residency: books and rules; its window is this one's.
        shape: of the model.
    """

    def __init__(self, residency: ExpertCache, shape: ModelShape) -> None:
        self._residency, self._window = residency, residency.window
        self._link = residency.link
        self._readback = Readback(self._link.driver, self._link.progress)
        self._layers, self._experts = shape.layers, shape.experts
        self.buffer = LookaheadBuffer(residency.pool.count)
        """What the drafts of this cycle were routed to."""
        self._confident: list[list[int]] = [[] for _ in range(shape.layers)]
        self._rest: list[list[int]] = [[] for _ in range(shape.layers)]
        self._nearest = shape.layers
        self.position: int | None = None
        """Of the token that is drafted; None: nothing is drafted."""
        self.verifies = False
        """The exact pass over a draft runs."""
        self._waiting: list[RouterCall] = []
        """Of the pass that drafts, where the routing is on a device."""
        self._begun = self._pass_s = 0.0
        """When the pass that drafts began, and what the one before it took."""
        self._room = 0.0
        """Copies that may still be asked for in this phase."""

    def begin(self) -> None:
        """A cycle starts: nothing is known of it."""
        self.stop()
        self.buffer.clear()

    def draft(self, position: int) -> None:
        """A pass starts that drafts the token at this position (0: the first)."""
        self.position, self._begun = position, self._link.clock()
        brings = (_GUIDED if position else _PRIMING) * self._pass_s / max(self._link.copy_s, 1e-9)
        on_their_way = 0 if self._residency.idle else len(self._residency.copies)
        self._room = 1 + int(brings) - on_their_way

    def drafted(self) -> None:
        """A pass has ended. On a device, its routing comes to the host now, all layers' in one copy."""
        if self._waiting and self.position is not None:
            both = [torch.cat([call.ids_TK.float(), call.weights_TK.float()], dim=1) for call in self._waiting]
            for call, rows in zip(self._waiting, self._readback.start(torch.stack(both)).tolist(), strict=True):
                top_k = call.ids_TK.shape[1]
                ids = [[int(expert) for expert in row[:top_k]] for row in rows]
                self._put(self.position, call.layer, ids, [row[top_k:] for row in rows])
        self._waiting.clear()
        self.position, self._pass_s = None, self._link.clock() - self._begun
        self.load()

    def verify(self) -> None:
        """The exact pass starts."""
        self.position, self.verifies = None, True
        self._room = math.inf
        self.load()

    def end(self) -> None:
        """The cycle is over: what is left was not needed."""
        self._residency.take_back(list(self._window.keys))
        self.stop()

    def routed(self, call: RouterCall) -> None:
        if self.position is None:
            return
        if self._link.driver is None:
            self._put(self.position, call.layer, call.ids_TK.tolist(), call.weights_TK.tolist())
            self.load()
        else:
            self._waiting.append(call)

    def reached(self, layer: int, keys: Sequence[int]) -> None:
        if self.verifies:
            self._confident[layer].clear()
            self._rest[layer].clear()
            self._residency.take_back(self._window.pop(layer).difference(keys))

    def load(self) -> None:
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
        self._nearest = self._layers  # nothing is left

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
        """Nothing more is loaded ahead. What is on its way may arrive."""
        self._window.clear()
        self._waiting.clear()
        for pending in (*self._confident, *self._rest):
            pending.clear()
        self._nearest, self.position, self.verifies = self._layers, None, False
