"""Bases of policies whose books find the expert to give up without looking at every slot.

L MoE layers, E routed experts per layer. An expert's key is layer * E + expert.
"""

from __future__ import annotations

import bisect
import heapq
import math
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from expertcast.runtime.policies.eviction.base import EvictionPolicy
from expertcast.runtime.policies.registry import CacheShape, PolicyConfig

_Entry = tuple[float, int, int]
"""Priority, stamp, key."""

_SLACK = 64
"""Outdated entries that a heap may hold before it is made anew, beside as many as there are valid ones."""


class ByPriority(EvictionPolicy):
    """Base of policies that give up the expert with the lowest priority, of equals the one accessed longest ago.

    An access, which is a copy or a use, is O(log n). `victim` is O(log n) on average plus one membership test per
    protected key in front of the one it finds: those are set aside until they are protected no longer, not sorted anew
    at each call.
    """

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._heap: list[_Entry] = []
        """Entries that are not in `_valid` any more are left in until they come to the top."""
        self._valid: dict[int, _Entry] = {}
        self._aside: list[_Entry] = []
        """Taken from the heap because their keys were protected."""
        self._clock = 0

    @abstractmethod
    def _priority(self, key: int) -> float:
        """How much an expert is worth keeping that is accessed now."""

    def insert(self, key: int, full: bool = True) -> None:
        self._access(key)

    def use(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._access(key)

    def remove(self, key: int) -> None:
        del self._valid[key]

    def clear(self) -> None:
        self._heap.clear()
        self._valid.clear()
        self._aside.clear()

    def victim(self, protected: Container[int]) -> int | None:
        heap, valid = self._heap, self._valid
        if self._aside:
            self._take_back(protected)
        while heap:
            entry = heap[0]
            key = entry[2]
            if valid.get(key) is not entry:
                heapq.heappop(heap)
            elif key in protected:
                self._aside.append(heapq.heappop(heap))
            else:
                return key
        return None

    def _access(self, key: int) -> None:
        self._clock += 1
        entry = self._valid[key] = (self._priority(key), self._clock, key)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._valid) + _SLACK:
            self._heap = list(self._valid.values())
            heapq.heapify(self._heap)
            self._aside.clear()

    def _take_back(self, protected: Container[int]) -> None:
        still = []
        for entry in self._aside:
            if self._valid.get(entry[2]) is entry:
                if entry[2] in protected:
                    still.append(entry)
                else:
                    heapq.heappush(self._heap, entry)
        self._aside = still


class ByLayer(EvictionPolicy):
    """Base of policies that go by an expert's layer first and by its last access then; an access is O(1)."""

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._orders: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(shape.layers)]
        """Keys of each layer, least recently accessed first, with the clock of that access."""
        self._occupied = 0
        """Bit l is set when layer l has keys."""
        self._clock = 0
        self._layer = 0
        """The running one."""

    def start_layer(self, layer: int, keys: Sequence[int]) -> None:
        self._layer = layer

    def insert(self, key: int, full: bool = True) -> None:
        layer = key // self.shape.experts
        self._clock += 1
        self._orders[layer][key] = self._clock
        self._occupied |= 1 << layer

    def use(self, keys: Sequence[int]) -> None:
        experts = self.shape.experts
        self._clock += 1
        for key in keys:
            order = self._orders[key // experts]
            order[key] = self._clock
            order.move_to_end(key)

    def remove(self, key: int) -> None:
        layer = key // self.shape.experts
        order = self._orders[layer]
        del order[key]
        if not order:
            self._occupied ^= 1 << layer

    def clear(self) -> None:
        for order in self._orders:
            order.clear()
        self._occupied = 0


def farthest_first(layers: int, current: int) -> Iterator[int]:
    """Layers of a bit mask by falling distance ahead, when `current` runs: itself (what it needs is settled, so it
    comes again after all others), the ones before it back to the first, then from the last down to the next one."""
    passed = layers & ((2 << current) - 1)
    for mask in (passed, layers ^ passed):
        while mask:
            layer = mask.bit_length() - 1
            mask ^= 1 << layer
            yield layer


@dataclass(slots=True)
class Scores:
    """A layer's scores, to rank its experts by and to compare them with other layers'."""

    value_E: Sequence[float]
    scale: float = 1.0
    """0 where all have the same score: then the values only order them."""
    offset: float = 0.0

    def of(self, expert: int) -> float:
        """An expert's score, comparable between layers."""
        return self.value_E[expert] * self.scale + self.offset


class Rescored(EvictionPolicy):
    """Base of policies that score all experts of a layer anew when something is learnt of the layer.

    A layer is ranked anew when a victim is asked for, at most once per change however many victims are taken:
    O(E log E) per layer that ran, O(E) where its order is much as it was. A decision then looks at the lowest of each
    layer, O(L), and at what is protected in front of it. Equals stay as they were ranked before, new ones last.
    """

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._changed = set(range(shape.layers))
        """Layers whose ranking is out of date."""
        self._ranking: list[list[int]] = [[] for _ in range(shape.layers)]
        """Residents (0..E-1) of each layer, those to give up first in front."""
        self._scores = [Scores([0.0] * shape.experts) for _ in range(shape.layers)]
        """By which the layers were ranked."""
        self._lowest = [math.inf] * shape.layers
        """Score of the first of each ranking."""

    @abstractmethod
    def _score(self, layer: int) -> Scores:
        """How much the layer's experts are worth keeping."""

    def insert(self, key: int, full: bool = True) -> None:
        layer, expert = divmod(key, self.shape.experts)
        if layer in self._changed:
            self._ranking[layer].append(expert)
        else:
            bisect.insort_right(self._ranking[layer], expert, key=self._scores[layer].value_E.__getitem__)
            self._note_lowest(layer)

    def use(self, keys: Sequence[int]) -> None:
        """Scores do not follow from what has a slot."""

    def remove(self, key: int) -> None:
        layer, expert = divmod(key, self.shape.experts)
        self._ranking[layer].remove(expert)
        self._note_lowest(layer)

    def clear(self) -> None:
        for layer, ranking in enumerate(self._ranking):
            ranking.clear()
            self._note_lowest(layer)

    def victim(self, protected: Container[int]) -> int | None:
        for layer in self._changed:
            ranking = self._ranking[layer]
            scores = self._scores[layer] = self._score(layer)
            ranking.sort(key=scores.value_E.__getitem__)
            self._note_lowest(layer)
        self._changed.clear()
        lowest = self._lowest.copy()
        while (score := min(lowest)) < math.inf:
            layer = lowest.index(score)
            first = layer * self.shape.experts
            expert = next((expert for expert in self._ranking[layer] if first + expert not in protected), None)
            lowest[layer] = math.inf if expert is None else self._scores[layer].of(expert)
            if expert is not None and lowest[layer] == score:
                return first + expert
        return None

    def _note_lowest(self, layer: int) -> None:
        ranking = self._ranking[layer]
        self._lowest[layer] = self._scores[layer].of(ranking[0]) if ranking else math.inf
