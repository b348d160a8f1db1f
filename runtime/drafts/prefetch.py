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
from collections.abc import Container, Mapping, Sequence
from typing import Protocol

import torch

from expertcast.data.batch import RouterCall
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import ModelShape
from expertcast.runtime.engine.cache import ExpertCache
from expertcast.runtime.links.driver import Readback

# The experts that drafted tokens were routed to: what verification will need (row C8).
#
# N positions, L MoE layers, E routed experts per layer, K experts per token. An expert's key is layer * E + expert.


class LookaheadBuffer:
    """N x L lists of experts with their confidence, filled while a draft is written.

    Position 0 is what verification feeds first, the last tokens that are certain; position i is the i-th drafted token.
    A draft of n passes fills n positions: what the last drafted token needs nobody knows before it is verified.

    Args:
        layers: L
        experts: E
        slots: experts that fit on the device; None: all of them.

    Raises:
        ExpertcastError: fewer than one layer or expert.
    """

    def __init__(self, layers: int, experts: int, slots: int | None = None) -> None:
        if layers < 1 or experts < 1:
            raise ExpertcastError(f"layers={layers}, experts={experts}: give 1 or more of both")
        self.layers, self.experts = layers, experts
        self._entries: list[list[dict[int, float]]] = []
        """[N][L] key -> highest confidence"""
        self._unions: list[dict[int, float]] = [{} for _ in range(layers)]
        """[L] the same over all positions."""
        self._first: list[list[int]] = []
        """[N] keys that stand at no earlier place, and have not been counted yet."""
        self._growth: list[int] = []
        self._distinct: list[int] = []
        """[N] keys that stand at no earlier place."""
        self._slots = layers * experts if slots is None else slots

    def put(
        self, position: int, layer: int, ids: Sequence[Sequence[int]], confidence: Sequence[Sequence[float]]
    ) -> None:
        """A layer of a draft pass was routed; what is there of this position and layer already stays.

        Args:
            position: of the tokens that were fed; positions come in order, none is left out.
            layer: whose router it was.
            ids: rows of experts (sequences of a batch, or several tokens), [R, K].
            confidence: of each, [R, K]: the draft router's probability or weight.

        Raises:
            ExpertcastError: a position was left out.
        """
        while position >= len(self._entries):
            if position > len(self._entries):
                raise ExpertcastError(f"position {position} comes before position {len(self._entries)}: leave none out")
            self._entries.append([{} for _ in range(self.layers)])
            self._first.append([])
            self._distinct.append(0)
        entry, union, first = self._entries[position][layer], self._unions[layer], self._first[position]
        base = layer * self.experts
        for row, own in zip(ids, confidence, strict=True):
            for expert, sure in zip(row, own, strict=True):
                key = base + expert
                if key not in union:
                    union[key] = entry[key] = sure
                    first.append(key)
                    self._distinct[position] += 1
                    continue
                if sure > union[key]:
                    union[key] = sure
                if sure > entry.get(key, -1.0):
                    entry[key] = sure

    def clear(self) -> None:
        """A new cycle begins."""
        self._entries.clear()
        self._first.clear()
        self._growth.clear()
        self._distinct.clear()
        for union in self._unions:
            union.clear()

    @property
    def positions(self) -> int:
        """N: positions that have an entry."""
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, int) and key in self._unions[key // self.experts]

    def union(self, layer: int, positions: int | None = None) -> Mapping[int, float]:
        """Key -> highest confidence over the first `positions` positions of a layer, all by default: not to be changed,
        and true until something is put or cleared."""
        if positions is None or positions >= len(self._entries):
            return self._unions[layer]
        highest: dict[int, float] = {}
        for entry in self._entries[:positions]:
            for key, sure in entry[layer].items():
                if sure > highest.get(key, -1.0):
                    highest[key] = sure
        return highest

    def new_experts(self, held: Container[int], positions: int | None = None) -> int:
        """How many distinct experts of the first `positions` positions, over all layers, are beyond the cache.

        A key is looked up when it is counted first, and stays what it was: an expert that was asked for since then is
        here or on its way, and was a copy of this cycle all the same. O(keys that were put since the last call).

        Args:
            held: keys that have a slot, or are on their way for another reason than this buffer.
            positions: all of them by default.
        """
        wanted = len(self._first) if positions is None else min(positions, len(self._first))
        for position in range(wanted):
            if position == len(self._growth):
                self._growth.append(0)
            uncounted = self._first[position]
            if uncounted:
                self._growth[position] += sum(key not in held for key in uncounted)
                uncounted.clear()
        return sum(self._growth[:wanted])

    @property
    def growth(self) -> list[int]:
        """Copies by position, of the positions that :meth:`new_experts` has counted in this cycle: new experts, and
        those of the others that the slots cannot keep beside them until their layer's turn, and that come again."""
        distinct = new = over = 0
        found = []
        for own, fresh in zip(self._distinct, self._growth, strict=False):
            distinct, new, before = distinct + own, new + fresh, over
            over = min(distinct - new, max(0, distinct - self._slots))
            found.append(fresh + over - before)
        return found


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

    def __init__(self, residency: ExpertCache, shape: ModelShape) -> None:
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
