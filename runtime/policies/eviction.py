"""Eviction policies, which choose the expert that gives up its slot, and pre-eviction policies, which free slots early.

A policy owns no tensor and starts no copy.

L MoE layers, E routed experts per layer, K experts per token. An expert's key is layer * E + expert.
"""

from __future__ import annotations

import bisect
import heapq
import math
import random
from abc import abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import add
from typing import ClassVar, Self

from torch import Tensor

from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.policies.base import CacheShape, Choice, Policy, PolicyConfig, PolicyRegistry, number, one_of
from expertcast.runtime.pools.cache import Pools
from expertcast.runtime.pools.states import State

PROMPT_ROWS = 64
"""Tokens of a prompt whose routing is told one by one."""


class EvictionPolicy(Policy):
    """The order in which resident experts are given up.

    The caller says what happens; `victim` only decides. For each layer of each forward the calls come in this order:

        start_pass      once per forward, before its first layer
        see_scores      the router's probabilities, only to policies that read them
        see_routing     what each token of a prompt was given, only to policies that read it
        start_layer     the layer's experts are known: the event that all of them belong to
        insert, remove  experts get and lose slots: this layer's misses, then what is prefetched
        touch           a forecast wants experts that have a slot already
        use             the layer computes with its experts
    """

    offline: ClassVar[bool] = False
    """Whether it must be told the future first: a bound for simulations, nothing to run a model with."""
    reads_scores: ClassVar[bool] = False
    """Whether `see_scores` is called (costs a copy to the host on a device)."""
    reads_routing: ClassVar[bool] = False
    """Whether `see_routing` is called."""
    reads_forecasts: ClassVar[bool] = False
    """Whether `see_forecast` is called."""
    reads_tokens: ClassVar[bool] = False
    """Whether `see_tokens` is called, where there is a forecaster of the next tokens."""

    def start_pass(self, fresh: bool) -> None:
        """A forward starts; `fresh`: with new texts (a prefill)."""

    def start_layer(self, layer: int, keys: Sequence[int]) -> None:
        """Layer `layer` computes with `keys` next (distinct; chosen experts after routing and misses are settled)."""

    def see_scores(self, layer: int, probability_E: Sequence[float]) -> None:
        """The router's softmax over all experts of a layer, mean over the step's tokens."""

    def see_routing(self, layer: int, experts: Sequence[Sequence[int]]) -> None:
        """Experts (0..E-1) of each of a prompt's last `PROMPT_ROWS` tokens, whose union `start_layer` names next."""

    def see_forecast(self, layer: int, probability_E: Sequence[float]) -> None:
        """A forecast's softmax over all experts of a layer that has not run yet, mean over the step's tokens."""

    def see_tokens(self, probability_HLE: Tensor) -> None:
        """A token begins, and this is forecast: probability that an expert is used by it (h = 0) and by the h-th token
        after it, [H, L, E]."""

    @abstractmethod
    def insert(self, key: int, full: bool = True) -> None:
        """The expert got a slot; `full`: in the model's own precision."""

    @abstractmethod
    def use(self, keys: Sequence[int]) -> None:
        """A layer computes with these resident experts."""

    def touch(self, keys: Sequence[int]) -> None:
        """A forecast wants these resident experts."""

    @abstractmethod
    def remove(self, key: int) -> None:
        """The expert lost its slot."""

    @abstractmethod
    def clear(self) -> None:
        """No expert has a slot any more. What was learnt of experts' use stays."""

    @abstractmethod
    def victim(self, protected: Container[int]) -> int | None:
        """The resident expert to give up next, none of the protected ones; None when all are protected."""

    def wanted(self) -> list[tuple[int, float]]:
        """Experts without a slot to load while the link is idle, with their worth, best first."""
        return []

    def worth(self, key: int) -> float | None:
        """Probability that the expert is used when its layer runs next; None: this policy does not know."""
        return None


class ByRecency(EvictionPolicy):
    """Base of policies that give up groups of experts in an order, and of a group the one accessed longest ago.

    An access, which is a copy or a use, is O(1). A decision looks at one expert per group, and at what is protected in
    front of it.
    """

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._groups: defaultdict[int, OrderedDict[int, int]] = defaultdict(OrderedDict)
        """Residents by group, least recently accessed first, with the clock of that access; no group is empty."""
        self._clock = 0

    @abstractmethod
    def _group(self, key: int) -> int:
        """The group of an expert; a resident's changes only between `remove` and `_access`."""

    def _order(self) -> Iterable[int]:
        """Groups, those to give up first in front; empty ones may be among them."""
        return sorted(self._groups)

    def insert(self, key: int, full: bool = True) -> None:
        self._clock += 1
        self._access(key)

    def use(self, keys: Sequence[int]) -> None:
        self._clock += 1
        for key in keys:
            self._access(key)

    def remove(self, key: int) -> None:
        group = self._group(key)
        del self._groups[group][key]
        if not self._groups[group]:
            del self._groups[group]

    def clear(self) -> None:
        self._groups.clear()

    def victim(self, protected: Container[int]) -> int | None:
        oldest = (self._oldest(group, protected) for group in self._order())
        return next((key for key in oldest if key is not None), None)

    def _oldest(self, group: int, protected: Container[int]) -> int | None:
        """The group's expert accessed longest ago that is not protected."""
        for key in self._groups.get(group, ()):
            if key not in protected:
                return key
        return None

    def _access(self, key: int) -> None:
        order = self._groups[self._group(key)]
        order[key] = self._clock
        order.move_to_end(key)


class ByLayer(ByRecency):
    """Base of policies that go by an expert's layer first: the layer that runs again last is given up first."""

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._layer = 0
        """The running one."""

    def _group(self, key: int) -> int:
        return key // self.shape.experts

    def _order(self) -> Iterable[int]:
        """The running layer, whose needs are settled, the ones before it, then from the last down to the next one."""
        return (*range(self._layer, -1, -1), *range(self.shape.layers - 1, self._layer, -1))

    def start_layer(self, layer: int, keys: Sequence[int]) -> None:
        self._layer = layer


_Entry = tuple[float, int, int]
"""Priority, stamp, key."""

_SLACK = 64
"""Outdated entries that a heap may hold before it is made anew, beside as many as there are valid ones."""


class ByPriority(EvictionPolicy):
    """Base of policies that give up the expert with the lowest priority, of equals the one accessed longest ago.

    An access, which is a copy or a use, is O(log n). So is `victim` on average, per protected expert in front of the
    one that it finds.
    """

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._heap: list[_Entry] = []
        """Entries that are not in `_valid` any more are left in until they come to the top."""
        self._valid: dict[int, _Entry] = {}
        self._clock = 0

    @abstractmethod
    def _priority(self, key: int) -> float:
        """Priority of an expert at its access; the lowest is evicted first."""

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

    def victim(self, protected: Container[int]) -> int | None:
        seen: list[_Entry] = []
        found = None
        while self._heap and found is None:
            entry = heapq.heappop(self._heap)
            if self._valid.get(entry[2]) is entry:
                seen.append(entry)
                found = None if entry[2] in protected else entry[2]
        for entry in seen:
            heapq.heappush(self._heap, entry)
        return found

    def _access(self, key: int) -> None:
        self._clock += 1
        entry = self._valid[key] = (self._priority(key), self._clock, key)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._valid) + _SLACK:
            self._heap = list(self._valid.values())
            heapq.heapify(self._heap)


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
        """Scores of the layer's experts; the lowest is evicted first."""

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


class NextRun(Rescored):
    """Base of policies by which the use of an expert is worth less the later its layer runs next.

    As time passes all scores change alike, so a layer's experts are ranked anew when the layer has run.
    """

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._pass = 0
        self._next = [0] * shape.layers
        """The pass in which each layer runs next."""

    def start_pass(self, fresh: bool) -> None:
        self._pass += 1
        for layer, due in enumerate(self._next):
            if due < self._pass:  # the pass before was cut short, or this policy rules over other layers
                self._next[layer] = self._pass
                self._changed.add(layer)

    def start_layer(self, layer: int, keys: Sequence[int]) -> None:
        self._next[layer] = self._pass + 1
        self._changed.add(layer)

    def _due(self, layer: int) -> float:
        """When the layer runs next, in passes."""
        return self._next[layer] + layer / self.shape.layers


class LRU(EvictionPolicy):
    """Gives up the expert that was not used for the longest time. Every operation is O(1)."""

    name = "lru"

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._order: OrderedDict[int, None] = OrderedDict()
        """Residents, least recently used first."""

    def insert(self, key: int, full: bool = True) -> None:
        self._order[key] = None

    def use(self, keys: Sequence[int]) -> None:
        move = self._order.move_to_end
        for key in keys:
            move(key)

    def remove(self, key: int) -> None:
        del self._order[key]

    def clear(self) -> None:
        self._order.clear()

    def victim(self, protected: Container[int]) -> int | None:
        for key in self._order:
            if key not in protected:
                return key
        return None


class FIFO(LRU):
    """Gives up the expert that has had its slot for longest, however often it was used: a baseline of ZipMoE's (section
    5.1). Every operation is O(1)."""

    name = "fifo"

    def use(self, keys: Sequence[int]) -> None:
        """Use does not count."""


class LFU(ByRecency):
    """Gives up the expert that was used least often since the start; ties by LRU.

    The count goes on where it was when an expert comes back. A use is one step of its layer, however many tokens.
    """

    name = "lfu"

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._uses: defaultdict[int, int] = defaultdict(int)

    def _group(self, key: int) -> int:
        return self._uses[key]

    def use(self, keys: Sequence[int]) -> None:
        for key in keys:
            self.remove(key)
            self._uses[key] += 1
            self._access(key)


class LFRU(LFU):
    """Gives up the expert with the lowest f / (now - last + 1); ties by f, then by LRU.

    f counts its uses since the start and goes on where it was when an expert comes back; the clock counts layers that
    ran, of those that this policy rules over. An insertion that no use follows (a prefetch) sets `last` alone. Of
    experts with equal f the one accessed longest ago is lowest, so a decision looks at one expert per count there is.

    Source: 2608.07911 compares it with Belady's bound in an event-atomic replay; the score, uses over age, is that of
    tinyserve (vLLM pull request 37190).
    """

    name = "lfru"

    def start_layer(self, layer: int, keys: Sequence[int]) -> None:
        self._clock += 1

    def insert(self, key: int, full: bool = True) -> None:
        self._access(key)

    def victim(self, protected: Container[int]) -> int | None:
        lowest: tuple[float, int] | None = None
        found = None
        for uses, order in self._groups.items():
            for key, last in order.items():
                if key not in protected:
                    score = (uses / (self._clock - last + 1), uses)
                    if lowest is None or score < lowest:
                        lowest, found = score, key
                    break
        return found


class LHU(LFU):
    """LFU that counts only uses while the expert was held in the model's own precision; without copies in a lower one
    it is LFU."""

    name = "lhu"

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._full: set[int] = set()
        """Experts that came in the model's own precision when they came last."""

    def insert(self, key: int, full: bool = True) -> None:
        (self._full.add if full else self._full.discard)(key)
        self._access(key)

    def use(self, keys: Sequence[int]) -> None:
        for key in keys:
            if key in self._full:
                super().use([key])
            else:
                self._access(key)


class Score(Rescored):
    """Gives up the expert with the lowest running mean of the router's probability, as a share of the highest one in
    its layer.

    The mean is over all steps of the layer, whether the expert was chosen or held in them or not. A layer whose router
    is sure of itself has a few high means and many very low ones: compared as they are, its experts would all go
    before those of a layer that is not (trap 13 under row A27).
    """

    name = "score"
    reads_scores = True

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._sums = [[0.0] * shape.experts for _ in range(shape.layers)]
        """[L][E] probabilities, summed over steps: as shares of the layer's highest they are what the means are."""

    def see_scores(self, layer: int, probability_E: Sequence[float]) -> None:
        self._sums[layer] = list(map(add, self._sums[layer], probability_E))
        self._changed.add(layer)

    def _score(self, layer: int) -> Scores:
        sums_E = self._sums[layer]
        return Scores(sums_E, 1 / (max(sums_E) or 1.0))


@dataclass(frozen=True, kw_only=True)
class MarkingConfig(PolicyConfig):
    seed: int = number(0, "[0, inf)")
    """Of the draws."""


class Marking(ByPriority):
    """Gives up an expert drawn from those that were not used in the present phase (Fiat et al., Competitive paging
    algorithms, 1991; a baseline of ZipMoE's). O(log n).

    A use marks an expert. When a marked one goes, because no other is left, the next phase begins: the marks set so far
    count no longer. An expert that comes in without being used, by a prefetch, is not marked.
    """

    name = "marking"
    config_class = MarkingConfig
    config: MarkingConfig

    def __init__(self, config: MarkingConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._random = random.Random(config.seed)
        self._phase = 0
        self._drawn: dict[int, float] = {}
        """Phase for which an expert is not marked, and its place among those of that phase."""

    def insert(self, key: int, full: bool = True) -> None:
        self._drawn[key] = self._phase + self._random.random()
        super().insert(key, full)

    def use(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._drawn[key] = self._phase + 1 + self._random.random()
        super().use(keys)

    def remove(self, key: int) -> None:
        super().remove(key)
        self._phase = max(self._phase, int(self._drawn.pop(key)))

    def clear(self) -> None:
        super().clear()
        self._drawn.clear()

    def _priority(self, key: int) -> float:
        return self._drawn[key]


@dataclass(frozen=True, kw_only=True)
class FLDConfig(PolicyConfig):
    """How far apart two layers are."""

    distance: str = one_of("cyclic", "absolute")
    """`cyclic`: layers until an expert's layer runs again. `absolute`: the difference of the layers' numbers, which
    gives up the first layer's experts at the last layer, just before they are needed."""


class FLD(ByLayer):
    """Gives up the expert whose layer is farthest from the running one; ties by LRU. O(L)."""

    name = "fld"
    config_class = FLDConfig
    config: FLDConfig

    def victim(self, protected: Container[int]) -> int | None:
        if self.config.distance == "cyclic":
            return super().victim(protected)
        oldest = (self._oldest(layer, protected) for layer in self._groups)
        return min((key for key in oldest if key is not None), key=self._place, default=None)

    def _place(self, key: int) -> tuple[int, int]:
        layer = self._group(key)
        return -abs(layer - self._layer), self._groups[layer][key]


@dataclass(frozen=True, kw_only=True)
class LeastStaleConfig(PolicyConfig):
    """Which of several stale experts is given up."""

    order: str = one_of("distance", "layer")
    """Among stale experts, and then among current ones: `distance` gives up those whose layer runs again last, `layer`
    those of the first layer, as the paper has it, which is LRU while the cache holds no more than one pass."""


class LeastStale(ByLayer):
    """Gives up stale experts, those last accessed in an earlier pass, before current ones.

    An access is a use, a copy or a forecast that wants the expert (trap 3 under row A27). The key, smallest first, is
    (current, -((layer - running layer - 1) mod L), last access), or (current, layer, last access) for `order=layer`
    (trap 2). O(L): a layer's stale experts are in front of its current ones, so that one order per layer serves as both
    of the paper's heaps.
    """

    name = "least_stale"
    config_class = LeastStaleConfig
    config: LeastStaleConfig

    def __init__(self, config: LeastStaleConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._began = 0
        """The clock when the pass began: what was accessed then or before is stale."""

    def start_pass(self, fresh: bool) -> None:
        self._began = self._clock

    def touch(self, keys: Sequence[int]) -> None:
        self.use(keys)

    def victim(self, protected: Container[int]) -> int | None:
        layers = tuple(self._order())
        for stale in (True, False):
            for layer in layers:
                for key, last in self._groups.get(layer, {}).items():
                    if stale and last > self._began:
                        break
                    if key not in protected:
                        return key
        return None

    def _order(self) -> Iterable[int]:
        return range(self.shape.layers) if self.config.order == "layer" else super()._order()


_HEAVY = 1e100
"""A use's weight from which on a layer's weights are scaled down."""


@dataclass(frozen=True, kw_only=True)
class ImportanceConfig(PolicyConfig):
    """How past use and forecast are weighed against each other."""

    alpha: float = number(0.5, "[0, 1]")
    """Share of past use; the rest is the forecast's (1: decayed counts alone, 0: forecasts alone)."""
    gamma: float = number(0.9, "(0, 1]")
    """What a use is worth after one more step of its layer, over 0 up to 1."""


class Importance(Rescored):
    """Gives up the expert with the lowest s = alpha h + (1 - alpha) p; ties by h.

    h is the decayed count of the expert's uses and p its probability in the forecast for its own layer (trap 2 under
    row D13), both as shares of the layer's residents; with nothing to share all have the same share (trap 3). A layer's
    last forecast stands until the next one: between runs of the layer it is the newest that is known. The sum over
    residents is taken once per change of the layer's uses or forecast, as the paper ranks once and then evicts in
    ascending order. The paper's window of T tokens is left out: at gamma 0.9 what lies 64 steps back weighs 0.001.
    """

    name = "importance"
    config_class = ImportanceConfig
    config: ImportanceConfig
    reads_forecasts = True

    def __init__(self, config: ImportanceConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._use = [1.0] * shape.layers
        """What a use weighs now: it grows by 1 / gamma per step, so that nothing else needs to decay."""
        self._hotness = [[0.0] * shape.experts for _ in range(shape.layers)]
        """[L][E] weight of all uses."""
        self._forecast: dict[int, Sequence[float]] = {}
        """[E] by layer, the last ones."""

    def see_forecast(self, layer: int, probability_E: Sequence[float]) -> None:
        self._forecast[layer] = probability_E
        self._changed.add(layer)

    def start_layer(self, layer: int, keys: Sequence[int]) -> None:
        self._use[layer] /= self.config.gamma
        if self._use[layer] > _HEAVY:
            self._hotness[layer] = [value / self._use[layer] for value in self._hotness[layer]]
            self._use[layer] = 1.0

    def use(self, keys: Sequence[int]) -> None:
        layer = keys[0] // self.shape.experts
        first, weight, hotness_E = layer * self.shape.experts, self._use[layer], self._hotness[layer]
        for key in keys:
            hotness_E[key - first] += weight
        self._changed.add(layer)

    def _score(self, layer: int) -> Scores:
        alpha, residents = self.config.alpha, self._ranking[layer]
        hotness_E, forecast_E = self._hotness[layer], self._forecast.get(layer)
        uses = sum(map(hotness_E.__getitem__, residents))
        chances = 0.0 if forecast_E is None else sum(map(forecast_E.__getitem__, residents))
        equal = ((0.0 if uses else alpha) + (0.0 if chances else 1 - alpha)) / max(1, len(residents))
        per_use = alpha / uses if uses else 0.0
        if forecast_E is None or not chances:
            return Scores(hotness_E, per_use, equal)
        per_chance = (1 - alpha) / chances
        return Scores([per_use * u + per_chance * p for u, p in zip(hotness_E, forecast_E, strict=True)], 1.0, equal)


class Pooled(ByRecency):
    """Gives up experts that only pass through a slot first, the one used longest ago, then full ones in the same order.

    No name chooses it: it comes with the pools of :attr:`OffloadConfig.pools`, over all slots.

    Args:
        pools: are told here of every use.
    """

    name = "pooled"

    def __init__(self, pools: Pools) -> None:
        anything = CacheShape(layers=1, experts=pools.experts, top_k=1, slots=0)  # is not read
        super().__init__(PolicyConfig(), anything)
        self._pools = pools

    def _group(self, key: int) -> int:
        return int(self._pools.state(key) is State.F)

    def start_layer(self, layer: int, keys: Sequence[int]) -> None:
        for key, state in self._pools.use(layer, keys):
            other = self._groups[int(state is not State.F)]
            if key in other:
                del other[key]
                self._access(key)

    def remove(self, key: int) -> None:
        full = self._group(key)
        super().remove(key)
        if full:
            self._pools.lose(key)

    def clear(self) -> None:
        super().clear()
        self._pools.clear()


class PreEviction(Policy):
    """How many slots should be free when a layer's routing becomes known; which experts go is the eviction policy's."""

    active: ClassVar[bool] = True
    """Whether `release_target` can be above 0."""

    @abstractmethod
    def release_target(self, probability_E: Sequence[float], predicted: Collection[int], resident: int) -> int:
        """Slots that should be free, those that are free already among them.

        Args:
            probability_E: a forecast's softmax over the layer's experts, mean over the step's tokens.
            predicted: the forecast's own experts, distinct.
            resident: how many of these have a slot.
        """


class NoPreEviction(PreEviction):
    """Slots are given up only for an expert that takes them."""

    name = "none"
    active = False

    def release_target(self, probability_E: Sequence[float], predicted: Collection[int], resident: int) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class GapConfig(PolicyConfig):
    """How many more slots than the forecast asks for are freed."""

    tau: float = number(0.02, "[0, 1]")
    """Neighbouring probabilities that differ by less than this are a tie: one slot more."""
    r_max: int = number(2, "[0, inf)")
    """Most slots kept free because of ties at the boundary."""
    literal: bool = False
    """Count every tie among the r_max gaps after the boundary, as the paper's equation does; false stops at the first
    gap that is none."""


class Gap(PreEviction):
    """The predicted experts that have no slot, and one slot more for every near tie at the boundary (eq. 14 to 17).

    For one token k is the router's K. For several tokens k is the number of distinct experts that they are predicted to
    use, and the boundary lies after the k-th expert by mean probability.
    """

    name = "gap"
    config_class = GapConfig
    config: GapConfig

    def release_target(self, probability_E: Sequence[float], predicted: Collection[int], resident: int) -> int:
        config, k = self.config, len(predicted)
        boundary = sorted(probability_E, reverse=True)[k - 1 : k + config.r_max] if k else []
        ties = 0
        for higher, lower in pairwise(boundary):
            if higher - lower < config.tau:
                ties += 1
            elif not config.literal:
                break
        return k - resident + ties


PRE_EVICTION: PolicyRegistry[PreEviction] = PolicyRegistry("pre-eviction policy", NoPreEviction, Gap)


SCOPES = ("global", "layer")


class Eviction:
    """The eviction policy over all slots (`global`), or one of its kind per layer over that layer's share (`layer`).

    Raises:
        ExpertcastError: a share that holds less than one token's experts.
    """

    def __init__(self, choice: Choice[EvictionPolicy], shape: CacheShape, scope: str = "global") -> None:
        self.shares = None if scope == "global" else layer_shares(shape)
        """Slots of each layer; None: all slots are everybody's."""
        if self.shares is None:
            self._take([choice.make(shape)] * shape.layers)
        else:
            self._take([choice.make(replace(shape, slots=share, sharing=1)) for share in self.shares])

    @classmethod
    def over_all(cls, policy: EvictionPolicy, layers: int) -> Self:
        """One that was made already, over all slots."""
        made = cls.__new__(cls)
        made.shares = None
        made._take([policy] * layers)
        return made

    def _take(self, by_layer: list[EvictionPolicy]) -> None:
        first = by_layer[0]
        self.by_layer, self.policies = by_layer, [first] if self.shares is None else by_layer
        self.reads_scores, self.reads_routing = first.reads_scores, first.reads_routing
        self.reads_forecasts, self.reads_tokens = first.reads_forecasts, first.reads_tokens

    def start_pass(self, fresh: bool) -> None:
        """A forward starts."""
        for policy in self.policies:
            policy.start_pass(fresh)

    def see_scores(self, layer: int, probability_E: Sequence[float]) -> None:
        """Tell the layer's policy its router's probabilities."""
        self.by_layer[layer].see_scores(layer, probability_E)

    def see_routing(self, layer: int, experts: Sequence[Sequence[int]]) -> None:
        """Tell the layer's policy the experts of each token of a prompt."""
        self.by_layer[layer].see_routing(layer, experts)

    def see_forecast(self, layer: int, probability_E: Sequence[float]) -> None:
        """Tell the layer's policy a forecast's probabilities."""
        self.by_layer[layer].see_forecast(layer, probability_E)

    def see_tokens(self, probability_HLE: Tensor) -> None:
        """Tell every policy what is forecast of the next tokens."""
        for policy in self.policies:
            policy.see_tokens(probability_HLE)

    def clear(self) -> None:
        """No expert has a slot any more."""
        for policy in self.policies:
            policy.clear()


def layer_shares(shape: CacheShape) -> list[int]:
    """Slots of each layer, as equal as can be; the first layers get what is left over.

    Raises:
        ExpertcastError: a share holds less than one token's experts.
    """
    share, over = divmod(shape.slots, shape.layers)
    if share < shape.top_k:
        raise ExpertcastError(
            f"slots={shape.slots} in {shape.layers} layers' shares leave {share} each, one token needs {shape.top_k}: "
            f"give slots={shape.layers * shape.top_k} or more, or scope='global'"
        )
    return [share + (layer < over) for layer in range(shape.layers)]
