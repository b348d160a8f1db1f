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
from collections.abc import Container, Sequence
from typing import Protocol

import torch

from expertcast.data.router_call import RouterCall
from expertcast.predictors.view import ModelShape
from expertcast.runtime.drafts.lookahead import LookaheadBuffer
from expertcast.runtime.engine.residency import Residency
from expertcast.runtime.links.exchange import Readback

CONFIDENT = 0.5
"""An entry is confident whose share of its token's combine weights is at least so much of a mean one's, 1 / K."""
_PRIMING, _GUIDED = 0.5, 1.0
"""Share of the link's copies in a draft pass that are asked for."""


class Watcher(Protocol):
    """Compares what a draft foresaw with what its verification needs."""

    def routed(self, position: int | None, call: RouterCall) -> None:
        """A router has run, in the pass that drafts the token at this position, or (None) in the verification."""

    def reached(self, layer: int, keys: Sequence[int], held: Container[int]) -> None:
        """The verification is about to request these experts of a layer (distinct keys); `held` have a slot."""


class Schedule:
    """Fills the buffer and asks for what is in it.

    Args:
        residency: books and rules; its window is this one's.
        shape: of the model.
    """

    def __init__(self, residency: Residency, shape: ModelShape) -> None:
        self._residency, self._window = residency, residency.window
        self._link = residency.link
        self._readback = Readback(self._link.driver, self._link.progress)
        self._layers, self._experts = shape.layers, shape.experts
        self.prefetch = True
        """False only fills the buffer: nothing is loaded ahead."""
        self.watcher: Watcher | None = None
        """Is told of every cycle, if there is one."""
        self.buffer = LookaheadBuffer(shape.layers, shape.experts, residency.pool.count)
        """What the drafts of this cycle were routed to."""
        self._confident: list[list[int]] = [[] for _ in range(shape.layers)]
        self._rest: list[list[int]] = [[] for _ in range(shape.layers)]
        self._nearest = shape.layers
        self._at: int | None = None
        """Position of the token that is drafted; None: nothing is drafted."""
        self._verifies = False
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
        self._at, self._begun = position, self._link.clock()
        brings = (_GUIDED if position else _PRIMING) * self._pass_s / max(self._link.copy_s, 1e-9)
        on_their_way = 0 if self._residency.idle else len(self._residency.copies)
        self._room = 1 + int(brings) - on_their_way

    def drafted(self) -> None:
        """A pass has ended. On a device, its routing comes to the host now, all layers' in one copy."""
        if self._waiting and self._at is not None:
            both = [torch.cat([call.ids_TK.float(), call.weights_TK.float()], dim=1) for call in self._waiting]
            for call, rows in zip(self._waiting, self._readback.start(torch.stack(both)).tolist(), strict=True):
                top_k = call.ids_TK.shape[1]
                ids = [[int(expert) for expert in row[:top_k]] for row in rows]
                self._put(self._at, call.layer, ids, [row[top_k:] for row in rows])
        self._waiting.clear()
        self._at, self._pass_s = None, self._link.clock() - self._begun
        self.load()

    def verify(self) -> None:
        """The exact pass starts."""
        self._at, self._verifies = None, True
        self._room = math.inf
        self.load()

    def end(self) -> None:
        """The cycle is over: what is left was not needed."""
        self._residency.take_back(list(self._window.keys))
        self.stop()

    def held(self) -> dict[int, int]:
        """Slot of each expert that has one."""
        return self._residency.pool.slots

    def routed(self, call: RouterCall) -> None:
        if self.watcher is not None and (self._at is not None or self._verifies):
            self.watcher.routed(self._at, call)
        if self._at is None:
            return
        if self._link.driver is None:
            self._put(self._at, call.layer, call.ids_TK.tolist(), call.weights_TK.tolist())
            self.load()
        else:
            self._waiting.append(call)

    def reached(self, layer: int, keys: Sequence[int]) -> None:
        if self._verifies:
            if self.watcher is not None:
                self.watcher.reached(layer, keys, self._residency.pool.slots)
            self._confident[layer].clear()
            self._rest[layer].clear()
            self._residency.take_back(self._window.pop(layer).difference(keys))

    def load(self) -> None:
        if not (self.prefetch and self._link.overlaps) or self._nearest >= self._layers:
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
        self.buffer.put(position, layer, ids, weights)
        first, slots, window = layer * self._experts, self._residency.pool.slots, self._window
        self.buffer.new_experts(slots)
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
        self._nearest, self._at, self._verifies = self._layers, None, False
