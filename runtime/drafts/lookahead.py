"""The experts that drafted tokens were routed to: what verification will need (row C8).

N positions, L MoE layers, E routed experts per layer, K experts per token. An expert's key is layer * E + expert.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from expertcast.predictors.errors import ExpertcastError


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
