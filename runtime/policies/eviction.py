"""Eviction policies, which select the expert to evict, and pre-eviction policies, which free slots early.

A policy only decides: it owns no tensor and starts no copy.

L MoE layers, E routed experts per layer, K experts per token, H rows of a forecast. The key of an expert is
layer * E + expert.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from abc import abstractmethod
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from operator import add
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field

from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.policies.base import CacheShape, Choice, Policy, PolicyConfig, PolicyRegistry
from expertcast.runtime.pools.states import State

if TYPE_CHECKING:
    from expertcast.runtime.pools.cache import Pools


PROMPT_ROWS = 64
"""Number of last tokens of a prompt that `see_routing` receives one by one."""
MOST = 0.75
"""Share of a layer's experts from which a step says nothing about which of them later steps need."""


class EvictionPolicy(Policy):
    """Base class of eviction policies: the order in which resident experts are evicted.

    The cache reports each event to the policy; only `victim` decides. The calls for one step are, in order:

        start_pass      once, before the first layer
        see_scores      per layer: probabilities of the router, if `reads_scores`
        see_routing     per layer: experts of each token of a prompt, if `reads_routing`
        start_layer     per layer: the experts that it needs
        insert, remove  experts get and lose slots: misses of this layer first, then prefetches
        touch           a forecast names experts that are resident
        use             the layer computes with its experts
    """

    offline: ClassVar[bool] = False
    """Whether the policy must know all future requests; such a policy runs in simulations only."""
    reads_scores: ClassVar[bool] = False
    """Whether `see_scores` is called; on a device each call costs a copy to the host."""
    reads_routing: ClassVar[bool] = False
    """Whether `see_routing` is called."""
    reads_forecasts: ClassVar[bool] = False
    """Whether `see_forecast` is called."""
    scans: bool = False
    """Whether experts that the running layer loads are evicted before others: then it loads a few at a time."""

    def start_pass(self, fresh: bool) -> None:
        """Note that a step starts; `fresh` if it reads new sequences (prefill)."""

    def start_layer(self, layer: int, keys: Sequence[int]) -> None:
        """Note the distinct experts that a layer computes with, after routing and misses are decided."""

    def see_scores(self, layer: int, probability_E: Sequence[float]) -> None:
        """Note the softmax of a layer's router [E], mean over the tokens of the step."""

    def see_routing(self, layer: int, experts: Sequence[Sequence[int]]) -> None:
        """Note the experts (0..E-1) of each of the last `PROMPT_ROWS` tokens of a prompt."""

    def see_forecast(self, layer: int, probability_E: Sequence[float]) -> None:
        """Note the softmax of a forecast for a later layer [E], mean over the tokens of the step."""

    @abstractmethod
    def insert(self, key: int, full: bool = True) -> None:
        """Note that an expert got a slot; `full` if it is in the precision of the model."""

    @abstractmethod
    def use(self, keys: Sequence[int]) -> None:
        """Note that a layer computes with these resident experts."""

    def touch(self, keys: Sequence[int]) -> None:
        """Note that a forecast names these resident experts."""

    @abstractmethod
    def remove(self, key: int) -> None:
        """Note that an expert lost its slot."""

    @abstractmethod
    def clear(self) -> None:
        """Forget which experts are resident; keep statistics of their use."""

    @abstractmethod
    def victim(self, protected: Container[int]) -> int | None:
        """Return the resident expert to evict next, or None if all are protected."""


class ByRecency(EvictionPolicy):
    """Base class of policies that evict from the lowest group, there the least recently accessed expert.

    An access is a copy or a use and takes O(1). A decision looks at one expert per group plus the protected experts
    before it.
    """

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._groups: defaultdict[int, OrderedDict[int, int]] = defaultdict(OrderedDict)
        """Clock of the last access of each resident, by group, least recently accessed first; no group is empty."""
        self._clock = 0

    @abstractmethod
    def _group(self, key: int) -> int:
        """Return the group of an expert. The group of a resident may change between `remove` and `_access` only."""

    def insert(self, key: int, full: bool = True) -> None:
        self._clock += 1
        self._groups[self._group(key)][key] = self._clock

    def use(self, keys: Sequence[int]) -> None:
        self._clock += 1
        for key in keys:
            self._access(key)

    def remove(self, key: int) -> None:
        order = self._groups[group := self._group(key)]
        del order[key]
        if not order:
            del self._groups[group]

    def clear(self) -> None:
        self._groups.clear()

    def victim(self, protected: Container[int]) -> int | None:
        for group in sorted(self._groups):
            for key in self._groups[group]:
                if key not in protected:
                    return key
        return None

    def _access(self, key: int) -> None:
        order = self._groups[self._group(key)]
        order[key] = self._clock
        order.move_to_end(key)


_Entry = tuple[float, int, int]
"""Priority, time of the access, key."""

_SLACK = 64
"""A heap is rebuilt when its outdated entries exceed the valid ones by this number."""


class ByPriority(EvictionPolicy):
    """Base class of policies that evict the expert with the lowest priority; ties by LRU.

    An access is a copy or a use and takes O(1). `victim` takes O(log n) on average for each access since the last call
    and each protected expert that it passes, and O(1) for each expert that is still protected.
    """

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._heap: list[_Entry] = []
        """Entries that are no longer in `_valid` stay until they reach the top."""
        self._aside: list[_Entry] = []
        """Entries outside the heap until no longer protected: of new accesses, and those that were at the top."""
        self._valid: dict[int, _Entry] = {}
        self._clock = 0

    @abstractmethod
    def _priority(self, key: int) -> float:
        """Return the priority of an expert now; the lowest is evicted first."""

    def insert(self, key: int, full: bool = True) -> None:
        self._access(key)

    def use(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._access(key)

    def remove(self, key: int) -> None:
        del self._valid[key]

    def clear(self) -> None:
        self._heap.clear()
        self._aside.clear()
        self._valid.clear()

    def victim(self, protected: Container[int]) -> int | None:
        """Raise outdated entries at the top of the heap first: a priority may rise between two accesses."""
        heap, valid, aside, self._aside = self._heap, self._valid, self._aside, list[_Entry]()
        for entry in aside:
            key = entry[2]
            if key in protected:
                self._aside.append(entry)
            elif valid.get(key) is entry:
                if (now := self._priority(key)) > entry[0]:
                    entry = valid[key] = (now, entry[1], key)
                heapq.heappush(heap, entry)
        while heap:
            entry = heap[0]
            key = entry[2]
            if valid.get(key) is not entry:
                heapq.heappop(heap)
            elif (now := self._priority(key)) > entry[0]:
                valid[key] = (now, entry[1], key)
                heapq.heapreplace(heap, valid[key])
            elif key in protected:
                self._aside.append(heapq.heappop(heap))
            else:
                return key
        return None

    def _access(self, key: int) -> None:
        self._clock += 1
        entry = self._valid[key] = (self._priority(key), self._clock, key)
        self._aside.append(entry)
        if len(self._heap) + len(self._aside) > 2 * len(self._valid) + _SLACK:
            self._heap = list(self._valid.values())
            heapq.heapify(self._heap)
            self._aside.clear()


class Rescored(EvictionPolicy):
    """Base class of policies that recompute the scores of all experts of a layer when the layer changes.

    `victim` ranks the changed layers once: O(E log E) each, O(E) if the order hardly changed. It then compares the
    lowest expert of each layer, O(L), plus the protected experts before it. Ties keep their previous order; new
    experts come last.
    """

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._changed = set(range(shape.layers))
        """Layers whose ranking is outdated."""
        self._ranking: list[list[int]] = [[] for _ in range(shape.layers)]
        """Residents (0..E-1) of each layer in the order of eviction."""
        self._scores = [[0.0] * shape.experts for _ in range(shape.layers)]
        """Scores that the current rankings follow [L][E]."""
        self._lowest = [math.inf] * shape.layers
        """Score of the first expert of each ranking."""

    @abstractmethod
    def _score(self, layer: int) -> list[float]:
        """Return the scores of a layer's experts [E], comparable between layers; the lowest is evicted first."""

    def insert(self, key: int, full: bool = True) -> None:
        layer, expert = divmod(key, self.shape.experts)
        if layer in self._changed:
            self._ranking[layer].append(expert)
        else:
            bisect.insort_right(self._ranking[layer], expert, key=self._scores[layer].__getitem__)
            self._note_lowest(layer)

    def use(self, keys: Sequence[int]) -> None:
        """Do nothing: scores do not depend on which experts are resident."""

    def remove(self, key: int) -> None:
        layer, expert = divmod(key, self.shape.experts)
        self._ranking[layer].remove(expert)
        self._note_lowest(layer)

    def clear(self) -> None:
        for layer, ranking in enumerate(self._ranking):
            ranking.clear()
            self._note_lowest(layer)

    def victim(self, protected: Container[int]) -> int | None:
        outdated = [layer for layer in self._changed if self._ranking[layer]]  # one of L policies has one layer only
        for layer in outdated:
            scores = self._scores[layer] = self._score(layer)
            self._ranking[layer].sort(key=scores.__getitem__)
            self._note_lowest(layer)
        self._changed.difference_update(outdated)
        lowest = self._lowest.copy()
        while (score := min(lowest)) < math.inf:
            layer = lowest.index(score)
            first = layer * self.shape.experts
            expert = next((expert for expert in self._ranking[layer] if first + expert not in protected), None)
            lowest[layer] = math.inf if expert is None else self._scores[layer][expert]
            if expert is not None and lowest[layer] == score:
                return first + expert
        return None

    def _note_lowest(self, layer: int) -> None:
        ranking = self._ranking[layer]
        self._lowest[layer] = self._scores[layer][ranking[0]] if ranking else math.inf


class LRU(EvictionPolicy):
    """Evicts the least recently accessed expert. Every operation is O(1)."""

    name = "lru"

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._order: OrderedDict[int, None] = OrderedDict()
        """Residents, least recently accessed first."""

    def insert(self, key: int, full: bool = True) -> None:
        self._order[key] = None

    def use(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._order.move_to_end(key)

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
    """Evicts the expert that has been resident for longest. Every operation is O(1).

    Source: a baseline of ZipMoE, section 5.1.
    """

    name = "fifo"

    def use(self, keys: Sequence[int]) -> None:
        """Do nothing: use does not change the order."""


class LFU(ByRecency):
    """Evicts the expert with the fewest uses since the start; ties by LRU.

    The count survives an eviction. One step of a layer counts as one use, whatever the number of tokens.
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


@dataclass(frozen=True, kw_only=True)
class LRFUConfig(PolicyConfig):
    """Options of :class:`LRFU`."""

    half_life: Annotated[float, Field(ge=0.1, le=65536)] = 16.0
    """Forward passes after which a use counts half. Smaller values approach LRU, larger ones LFU."""


class LRFU(ByPriority):
    """Evicts the expert with the lowest decayed number of uses: a use counts half after each `half_life` passes.

    The sum over uses survives an eviction. All sums decay alike, so their order changes by uses only: the policy keeps
    log2 of the sum of 2^(time / half_life) over uses. A use takes O(1); a decision corrects the order of experts that
    were used since, O(log n) each. Prefetched experts without a use come first. Ties by age of the copy.

    A layer that needs more experts than its share of the slots would evict what the next layers need, and in the next
    prompt these would do the same to it. Experts that it loads once the slots or its share are full are passing:
    evicted first, until a decode step uses them. This holds for prompts, and for steps that run most experts of a
    layer.

    With 16 passes, hits on the bundled model are .80 where LRU has .76 and LFU .77 (25% of the experts in slots), .54
    where they have .38 and .49 (10%). On recorded routing of two large models it is between equal to LRU and 6 points
    above.

    Source: Lee et al., LRFU: a spectrum of policies that subsumes the LRU and LFU policies (2001).
    """

    name = "lrfu"
    config_class = LRFUConfig
    config: LRFUConfig

    def __init__(self, config: LRFUConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._pass = 0
        self._now = 0.0
        """Time in half-lives. A pass takes one unit, and its layers run at equal distances."""
        self._uses: dict[int, float] = {}
        """log2 of each expert's sum."""
        self._share = shape.slots / (shape.sharing or shape.layers)
        """Slots per layer."""
        self._fits = self._share
        """Largest number of experts of a layer in the running step that is no scan."""
        self._held = [0] * shape.layers
        """Number of residents by layer."""
        self._passing: set[int] = set()
        """Residents that a scan loaded and no other step has used."""

    def start_pass(self, fresh: bool) -> None:
        self._pass += 1
        self._fits, self.scans = max(self._share, 0.0 if fresh else MOST * self.shape.experts), False

    def start_layer(self, layer: int, keys: Sequence[int]) -> None:
        self._now = (self._pass + layer / self.shape.layers) / self.config.half_life
        self.scans = len(keys) > self._fits

    def insert(self, key: int, full: bool = True) -> None:
        layer = key // self.shape.experts
        self._held[layer] += 1
        if self.scans and (self._held[layer] > self._share or len(self._valid) + 1 >= self.shape.slots):
            self._passing.add(key)
        self._access(key)

    def remove(self, key: int) -> None:
        del self._valid[key]
        self._held[key // self.shape.experts] -= 1
        self._passing.discard(key)

    def clear(self) -> None:
        super().clear()
        self._held = [0] * self.shape.layers
        self._passing.clear()

    def _priority(self, key: int) -> float:
        return -math.inf if key in self._passing else self._uses.get(key, -math.inf)

    def use(self, keys: Sequence[int]) -> None:
        if not self.scans:
            self._passing.difference_update(keys)
        uses, now = self._uses, self._now
        for key in keys:
            uses[key] = now + math.log2(1.0 + 2.0 ** (uses[key] - now)) if key in uses else now


class LHU(LFU):
    """Evicts the expert with the fewest uses at full precision; ties by LRU.

    Without copies of lower precision this is LFU. Source: HOBBIT (2024).
    """

    name = "lhu"

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._full: set[int] = set()
        """Experts whose last copy was in the precision of the model."""

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
    """Evicts the expert with the lowest mean router probability, relative to the highest mean in its layer.

    The mean is over all steps of the layer, also those that did not choose the expert. Relative means make layers
    comparable: without them, a layer with a sharp router would lose nearly all its experts first.

    Source: Zhu et al. (2025), as in SpecMD; the normalisation per layer is this project's.
    """

    name = "score"
    reads_scores = True

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._sums = [[0.0] * shape.experts for _ in range(shape.layers)]
        """Sum of probabilities over steps [L][E]; its ratios within a layer equal those of the means."""

    def see_scores(self, layer: int, probability_E: Sequence[float]) -> None:
        self._sums[layer] = list(map(add, self._sums[layer], probability_E))
        self._changed.add(layer)

    def _score(self, layer: int) -> list[float]:
        scale = 1 / (max(self._sums[layer]) or 1.0)
        return [total * scale for total in self._sums[layer]]


class LeastStale(ByRecency):
    """Evicts stale experts, which were last accessed in an earlier pass, before current ones.

    An access is a use, a copy or a forecast that names the expert. Experts are ordered by (current,
    -((layer - running layer - 1) mod L), last access); the smallest is evicted. O(L).

    Source: Least-Stale, SpecMD; order by distance is this project's.
    """

    name = "least_stale"

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._layer = 0
        """Running layer."""
        self._began = 0
        """Clock at the start of the pass; experts accessed then or before are stale."""

    def start_pass(self, fresh: bool) -> None:
        self._began = self._clock

    def start_layer(self, layer: int, keys: Sequence[int]) -> None:
        self._layer = layer

    def _group(self, key: int) -> int:
        return key // self.shape.experts

    def touch(self, keys: Sequence[int]) -> None:
        self.use(keys)

    def victim(self, protected: Container[int]) -> int | None:
        # those whose next run is farthest away first: the running layer, those before it, then from the last one down
        layers = (*range(self._layer, -1, -1), *range(self.shape.layers - 1, self._layer, -1))
        for stale in (True, False):
            for layer in layers:
                for key, last in self._groups.get(layer, {}).items():
                    if stale and last > self._began:
                        break
                    if key not in protected:
                        return key
        return None


_MAX_WEIGHT = 1e100
"""Weight of a use above which the weights of a layer are scaled down."""


@dataclass(frozen=True, kw_only=True)
class ImportanceConfig(PolicyConfig):
    """Options of :class:`Importance`."""

    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Weight of past use; the forecast has 1 - alpha."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Factor by which a use decays per step of its layer."""


class Importance(Rescored):
    """Evicts the expert with the lowest s = alpha h + (1 - alpha) p; ties by h.

    h is the decayed number of uses and p the probability in the latest forecast for the expert's layer, each divided by
    its sum over the residents of the layer. If a sum is 0, all residents have the same share. The shares are computed
    once per change of the layer's uses or forecast.

    Source: ActiveEvict, eq. 8 to 13. Here h and p are of the same layer, and the window of T tokens is left out: with
    gamma 0.9 a use weighs 0.001 after 64 steps.
    """

    name = "importance"
    config_class = ImportanceConfig
    config: ImportanceConfig
    reads_forecasts = True

    def __init__(self, config: ImportanceConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._use = [1.0] * shape.layers
        """Weight of a use now. It grows by 1 / gamma per step, so that earlier uses need no update."""
        self._hotness = [[0.0] * shape.experts for _ in range(shape.layers)]
        """Weight of all uses [L][E]."""
        self._forecast: dict[int, Sequence[float]] = {}
        """Latest forecast of each layer [E]."""

    def see_forecast(self, layer: int, probability_E: Sequence[float]) -> None:
        self._forecast[layer] = probability_E
        self._changed.add(layer)

    def start_layer(self, layer: int, keys: Sequence[int]) -> None:
        self._use[layer] /= self.config.gamma
        if self._use[layer] > _MAX_WEIGHT:
            self._hotness[layer] = [value / self._use[layer] for value in self._hotness[layer]]
            self._use[layer] = 1.0

    def use(self, keys: Sequence[int]) -> None:
        layer = keys[0] // self.shape.experts
        first, weight, hotness_E = layer * self.shape.experts, self._use[layer], self._hotness[layer]
        for key in keys:
            hotness_E[key - first] += weight
        self._changed.add(layer)

    def _score(self, layer: int) -> list[float]:
        alpha, residents = self.config.alpha, self._ranking[layer]
        hotness_E, forecast_E = self._hotness[layer], self._forecast.get(layer, [0.0] * self.shape.experts)
        uses, chances = (sum(map(values_E.__getitem__, residents)) for values_E in (hotness_E, forecast_E))
        equal = ((0.0 if uses else alpha) + (0.0 if chances else 1 - alpha)) / max(1, len(residents))
        per_use = alpha / uses if uses else 0.0
        per_chance = (1 - alpha) / chances if chances else 0.0
        return [per_use * u + per_chance * p + equal for u, p in zip(hotness_E, forecast_E, strict=True)]


# Offline bound. An event is one layer of one step, as the list of distinct experts that it needs.

Events = Sequence[Sequence[int]]


class Belady(ByPriority):
    """Evicts the expert whose next use is farthest away; ties by LRU. O(log n).

    Call :meth:`set_future` first. No policy that loads on demand has fewer misses if every event fits the slots and
    every missed expert gets a slot.

    Source: Belady (1966).
    """

    name = "belady"
    offline = True

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._events: Events = ()
        self._nexts: list[list[int]] = []
        self._next: dict[int, int] = {}
        """Event of each key's next use; may lack keys that are not used again."""
        self._event = 0
        """Index of the next event."""

    def set_future(self, events: Events) -> None:
        """Set the keys of all future events in order; each call of `start_layer` is one event.

        A policy that manages one layer receives the events of that layer, `events[layer::L]`.
        """
        self._events, self._event = events, 0
        self._nexts, self._next = next_uses(events)
        for key in list(self._valid):
            self._access(key)

    def start_layer(self, layer: int, keys: Sequence[int]) -> None:
        """Advance by one event, which is the one that `set_future` received."""
        events, index = self._events, self._event
        assert set(keys) == set(events[index]), "not the events of set_future()"
        self._next.update(zip(events[index], self._nexts[index], strict=True))
        self._event += 1

    def _priority(self, key: int) -> float:
        return -self._next.get(key, len(self._nexts))


def next_uses(events: Events) -> tuple[list[list[int]], dict[int, int]]:
    """Find the next use of every key of every event.

    Returns:
        For each event the index of the next event that needs each of its keys (`len(events)`: never), and the index of
        the first event that needs each key.
    """
    coming: dict[int, int] = {}
    nexts = []
    for index in range(len(events) - 1, -1, -1):
        nexts.append([coming.get(key, len(events)) for key in events[index]])
        coming.update(dict.fromkeys(events[index], index))
    nexts.reverse()
    return nexts, coming


class PoolEviction(ByRecency):
    """Evicts experts outside pool F first, then experts of pool F; ties by LRU.

    :attr:`OffloadConfig.pools` selects this policy; it has no name in the registry and manages all slots.

    Args:
        pools: pools of partial experts; this policy reports every use to them.
    """

    name = "pooled"

    def __init__(self, pools: Pools) -> None:
        unused = CacheShape(layers=1, experts=pools.experts, top_k=1, slots=0)
        super().__init__(PolicyConfig(), unused)
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
    """Base class of pre-eviction policies: how many slots are freed before the routing of a layer is known.

    The eviction policy selects the experts.
    """

    active: ClassVar[bool] = True
    """Whether `release_target` can be above 0."""

    @abstractmethod
    def release_target(self, probability_E: Sequence[float], predicted: Collection[int], resident: int) -> int:
        """Return the number of slots that should be free, including those that are free already.

        Args:
            probability_E: softmax of the forecast [E], mean over the tokens of the step.
            predicted: distinct experts that the forecast names.
            resident: number of predicted experts that are resident.
        """


class NoPreEviction(PreEviction):
    """Frees no slot in advance."""

    name = "none"
    active = False

    def release_target(self, probability_E: Sequence[float], predicted: Collection[int], resident: int) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class GapConfig(PolicyConfig):
    """Options of :class:`Gap`."""

    tau: Annotated[float, Field(ge=0, le=1)] = 0.02
    """Consecutive probabilities that differ by less than this are a tie, which frees one more slot."""
    r_max: Annotated[int, Field(ge=0)] = 2
    """Maximum number of slots freed because of ties."""


class Gap(PreEviction):
    """Frees a slot for each predicted expert that is absent, plus one for each tie after the k-th probability.

    k is the number of distinct experts that the forecast names for the tokens of the step. Ties end at the first
    larger gap.

    Source: ActiveEvict, eq. 14 to 17; the paper also counts ties behind larger gaps.
    """

    name = "gap"
    config_class = GapConfig
    config: GapConfig

    def release_target(self, probability_E: Sequence[float], predicted: Collection[int], resident: int) -> int:
        config, k = self.config, len(predicted)
        boundary = sorted(probability_E, reverse=True)[k - 1 : k + config.r_max] if k else []
        ties = takewhile(lambda gap: gap < config.tau, (higher - lower for higher, lower in pairwise(boundary)))
        return k - resident + len(list(ties))


PRE_EVICTION: PolicyRegistry[PreEviction] = PolicyRegistry("pre-eviction policy", NoPreEviction, Gap)


SCOPES = ("global", "layer")


class Eviction:
    """Eviction by one policy per region of slots (scope `global`) or one policy per layer (scope `layer`).

    Args:
        choice: the policy.
        shape: size of the cache.
        scope: `global` or `layer`.

    Raises:
        ExpertcastError: the share of a layer holds fewer experts than one token needs.
    """

    def __init__(self, choice: Choice[EvictionPolicy], shape: CacheShape, scope: str = "global") -> None:
        groups = [region[:2] for region in shape.regions] or [(tuple(range(shape.layers)), shape.slots)]
        if scope == "layer":
            layer_shares(shape)  # raises
            shared = [
                (layers, layer_shares(replace(shape, layers=len(layers), slots=count))) for layers, count in groups
            ]
            groups = sorted(((layer,), share) for own in shared for layer, share in zip(*own, strict=True))
        self._set([choice.make(replace(shape, slots=count, sharing=len(layers))) for layers, count in groups], groups)

    @classmethod
    def from_policy(cls, policy: EvictionPolicy, shape: CacheShape) -> Self:
        """Return the eviction of all slots by an existing policy."""
        eviction = cls.__new__(cls)
        eviction._set([policy], [(tuple(range(shape.layers)), shape.slots)])
        return eviction

    def _set(self, policies: list[EvictionPolicy], groups: Sequence[tuple[tuple[int, ...], int]]) -> None:
        of_layer = {layer: number for number, (layers, _) in enumerate(groups) for layer in layers}
        self.group_of = [of_layer[layer] for layer in range(len(of_layer))]
        """Number of each layer's group: layers that share slots and a policy."""
        self.shares = [count for _, count in groups]
        """Number of slots of each group."""
        self.policies, first = policies, policies[0]
        self.by_layer = [policies[number] for number in self.group_of]
        self.reads_scores, self.reads_routing = first.reads_scores, first.reads_routing
        self.reads_forecasts = first.reads_forecasts

    def victim(self, layer: int, protected: Container[int], resident: Container[int]) -> int | None:
        """Return the expert that a layer's policy evicts; None: all are protected.

        Raises:
            ExpertcastError: the policy names an expert that is not resident, or is protected.
        """
        policy = self.by_layer[layer]
        key = policy.victim(protected)
        if key is not None and (key not in resident or key in protected):
            raise ExpertcastError(
                f"eviction policy {policy.name!r} evicts {key!r} for layer {layer}: give the key of a resident expert "
                "that is not protected, or None"
            )
        return key

    def start_pass(self, fresh: bool) -> None:
        """Call `start_pass` of every policy."""
        for policy in self.policies:
            policy.start_pass(fresh)

    def clear(self) -> None:
        """Call `clear` of every policy."""
        for policy in self.policies:
            policy.clear()


def layer_shares(shape: CacheShape) -> list[int]:
    """Divide the slots evenly among layers; the first layers get the remainder.

    Returns:
        Number of slots of each layer.

    Raises:
        ExpertcastError: a share holds fewer experts than one token needs.
    """
    share, over = divmod(shape.slots, shape.layers)
    if share < shape.top_k:
        raise ExpertcastError(
            f"slots={shape.slots} leave {share} for each of {shape.layers} layers, but a token needs {shape.top_k}: "
            f"give slots={shape.layers * shape.top_k} or more, or scope='global'"
        )
    return [share + (layer < over) for layer in range(shape.layers)]


# Eviction by a model of the next uses that learns from routing while the model runs.
#
# R layers that share the slots, E routed experts per layer, N visited layers, F features of an expert, H half-lives, K
# experts of a visit, T past visits. A visit is one token at one layer, or one step of several sequences. Column E is of
# no expert: it fills rows of unequal length.
#
# Source: this project.

Numbers = npt.NDArray[np.floating]
Ids = npt.NDArray[np.int64]

HALF_LIVES = (8, 1, 3, 24, 1024)
"""Half-lives of the averages of use, in visits; before learning, the forecast is the first average."""
_DECAY_H11 = np.array([[[0.5 ** (1 / half_life)]] for half_life in HALF_LIVES], dtype=np.float32)
_PAIR_PRIOR = 4.0
"""Weight, in visits, of an expert's overall rate in the estimate of its rate after another expert."""
_MEMORY = 256
"""Number of past visits among which the model looks for those with the same experts as now."""
_AFTER = (1.0, 0.8, 0.64, 0.512)
"""Weights of the visits after such a visit."""
_ALIKE_PRIOR = 0.1
"""Weight of an expert's overall rate beside its rate after such visits."""
FEATURES = len(HALF_LIVES) + 4
"""Number of features, F."""


class UsageModel:
    """Online logistic regression of whether an expert is used within the next `horizon` visits of its layer.

    All layers share the weights. :meth:`learn` labels the features of `horizon` visits ago, and the weights take one
    Newton step on the log loss of all visits so far. A quadratic prior holds the weights at the first average of use.
    The model needs no training, step size or random numbers, and its memory is constant.

    Args:
        layers: number of layers, R.
        experts: experts per layer, E.
        top_k: experts per token.
        horizon: number of visits ahead.
        prior: strength of the prior, in visits.
    """

    def __init__(self, *, layers: int, experts: int, top_k: int, horizon: int, prior: float) -> None:
        self._experts, self._share, self._horizon = experts, np.float32(top_k / experts), horizon
        self._now = 0
        """Number of visits of each layer in earlier passes."""
        self._average_HRE = np.zeros((len(HALF_LIVES), layers, experts), dtype=np.float32)
        self._followed = np.zeros((layers * (experts + 1), experts + 1), dtype=np.float32)
        """Number of visits that used the second expert directly after a visit that used the first, which is given as
        row * (E + 1) + expert; column E counts all of the latter."""
        self._used = np.zeros((horizon, layers, experts), dtype=bool)
        """Use in each of the last visits; visit i is at i modulo the horizon."""
        self._x = np.zeros((horizon + 1, FEATURES, layers, experts), dtype=np.float32)
        """Features before each of these visits and the next; visit i is at i modulo the horizon + 1."""
        self._x[0, [0, -1]] = 1.0
        self._weight_F = np.zeros(FEATURES)
        self._weight_F[:2] = np.log(min(0.5, horizon * top_k / experts)), 1.0
        self._precision_FF = np.eye(FEATURES) * prior
        self._first = -1
        """Visit at place 0 of the memory; there is none before visit 0."""
        none_R1 = np.arange(1, layers + 1)[:, None] * (experts + 1) - 1
        self._past_TRK = np.tile(none_R1, (2 * _MEMORY, 1, top_k))
        """Experts of each visit, as row * (E + 1) + expert."""
        self._shared_T = np.zeros(2 * _MEMORY, dtype=np.float32)
        """Number of experts that each visit shares with now, layers that ran before counting less."""
        self._sharpness = 2 / math.sqrt(layers * top_k)

    def visit(self, first: int, experts: Sequence[Sequence[int]], number: int = 0) -> Numbers:
        """Note one visit of each of N consecutive layers.

        Args:
            first: first of the layers (0..R-1).
            experts: distinct experts (0..E-1) that each of them used.
            number: number of visits of these layers since the pass started.

        Returns:
            Log-odds of a use within the horizon [N, E].
        """
        count, width, (_, layers, most) = len(experts), self._experts + 1, self._past_TRK.shape
        visit, span, place = self._now + number, slice(first, first + count), self._now + number - self._first
        filled = list(itertools.zip_longest(*experts, fillvalue=self._experts))
        start_N1 = np.arange(first, first + count)[:, None] * width
        used_NK = start_N1 + np.array(filled, dtype=np.int64).reshape(-1, count).T
        used_R = np.zeros(layers * width, dtype=np.float32)
        used_R[used_NK] = 1.0
        used_R[self._experts :: width] = 0.0
        used_NE = self._used[visit % self._horizon, span] = used_R.reshape(layers, width)[span, :-1]
        self._past_TRK[place, span] = start_N1 + self._experts
        self._past_TRK[place, span, : used_NK.shape[1]] = used_NK[:, :most]
        average_HNE = self._average_HRE[:, span] * _DECAY_H11 + used_NE
        self._average_HRE[:, span] = average_HNE
        x_FNE = np.empty((FEATURES, count, self._experts), dtype=np.float32)
        x_FNE[0], x_FNE[-1] = 1.0, average_HNE[-1] == 0
        weight_H11 = (1 - _DECAY_H11 ** (visit + 1)) / (1 - _DECAY_H11)
        x_FNE[1:-3] = (average_HNE + self._share) / (self._share * (weight_H11 + 1))
        x_FNE[-3] = self._after_these(place, span, used_NE, x_FNE[-4])
        x_FNE[-2] = 1.0 if number else self._after_alike(span, used_R, x_FNE[-4])
        np.log(x_FNE[1:-1], out=x_FNE[1:-1])
        self._x[(visit + 1) % (self._horizon + 1)][:, span] = x_FNE
        odds_M: Numbers = self._weight_F.astype(np.float32) @ x_FNE.reshape(FEATURES, -1)
        return odds_M.reshape(count, -1)

    def learn(self, span: slice, number: int = 0) -> None:
        """Learn from features before the visit `horizon` visits ago, after some layers' visit of that number."""
        visit = self._now + number + 1
        if visit < self._horizon:
            return
        x_FM = self._x[(visit + 1) % (self._horizon + 1)][:, span].reshape(FEATURES, -1)
        used_M = self._used[:, span].any(axis=0).ravel()
        odds_M = self._weight_F.astype(np.float32) @ x_FM
        chance_M = 1 / (1 + np.exp(-np.clip(odds_M, -30, 30)))
        self._precision_FF += (x_FM * (chance_M * (1 - chance_M))) @ x_FM.T
        self._weight_F = self._weight_F + np.linalg.solve(self._precision_FF, x_FM @ (used_M - chance_M))

    def end_pass(self, visits: int) -> None:
        """Note that each layer had this number of visits since the last call."""
        self._now += visits
        self._shared_T = np.roll(self._shared_T, 1) if visits == 1 else np.zeros_like(self._shared_T)
        old = self._now - self._first - _MEMORY
        if old > _MEMORY - 2 * PROMPT_ROWS:
            self._first += old
            for memory in (self._past_TRK, self._shared_T):
                memory[:_MEMORY] = memory[old : old + _MEMORY].copy()

    def _after_these(self, place: int, span: slice, used_NE: Numbers, rate_NE: Numbers) -> Numbers:
        """Return how much more often than usual each expert follows the experts of this visit [N, E]."""
        before_NK, now_NK = self._past_TRK[place - 1 : place + 1, span]
        self._followed[before_NK, :-1] += used_NE[:, None]
        self._followed[before_NK, -1] += 1
        followed_NKE = self._followed[now_NK]
        none_NK = now_NK % (self._experts + 1) == self._experts
        per_use_NK = ~none_NK / (followed_NKE[:, :, -1] + _PAIR_PRIOR)
        followed_NE = (per_use_NK[:, None] @ followed_NKE)[:, 0, :-1]
        usual_N1 = (_PAIR_PRIOR * per_use_NK + none_NK).sum(axis=1, keepdims=True)
        ratio_NE: Numbers = (followed_NE / (rate_NE * self._share) + usual_N1) / now_NK.shape[1]
        return ratio_NE

    def _after_alike(self, span: slice, used_R: Numbers, rate_NE: Numbers) -> Numbers:
        """Return how much more often than usual each expert was used after visits like this one [N, E].

        Alike are visits that share many of the experts that this pass and the last ones used.
        """
        place, width = self._now - self._first, self._experts + 1
        low = max(0, place - _MEMORY)
        if place - low < len(_AFTER):
            return np.ones_like(rate_NE)
        past_TM = self._past_TRK[low:place, span].reshape(place - low, -1)
        shared_T = self._shared_T[low:place]
        shared_T *= 1 - len(rate_NE) / self._used.shape[1]
        shared_T += used_R[past_TM].sum(axis=1)
        like_T = np.exp(self._sharpness * (shared_T - shared_T.max()))[:-1]
        after_T = np.convolve(like_T, _AFTER)[: len(like_T)]
        found = np.bincount(past_TM[1:].ravel(), np.repeat(after_T, past_TM.shape[1]), len(used_R))
        found_NE = found.reshape(-1, width)[span, :-1]
        total = after_T.sum()
        ratio_NE: Numbers = (found_NE / (rate_NE * self._share) + _ALIKE_PRIOR * total) / ((1 + _ALIKE_PRIOR) * total)
        return ratio_NE


_MAX_HORIZON = 8
_PARTS = 8
"""Number of parts of a pass after each of which the layers that ran in it are scored, all at once."""
_NEAREST = 64
"""Number of experts that are put in order at a time."""


_PRIOR = 3.0
"""Strength of the prior, which is an average of recent use, in visits."""
_LEAD = 0.5
"""Reduction of the log-odds of an expert whose layer runs one token later."""


class NextUse(EvictionPolicy):
    """Evicts the expert that is least likely to be used soon, by an online model of use.

    The score is the log-odds of a use within the horizon (:class:`UsageModel`), reduced for layers that run later. The
    horizon is 1.5 times the number of tokens whose experts fit the cache, from 1 to 8 visits of a layer. The model
    learns from the tokens of the prompt on, once per pass. Eight times per pass, all layers that ran since are scored
    at once; until then the experts that they used are evicted last. A pass takes O(R E F^2), and memory is constant.
    """

    name = "next_use"
    reads_routing = True

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        layers = shape.sharing or shape.layers
        tokens = shape.slots / (layers * shape.top_k)
        horizon = min(_MAX_HORIZON, max(1, round(1.5 * tokens)))
        self._model = UsageModel(layers=layers, experts=shape.experts, top_k=shape.top_k, horizon=horizon, prior=_PRIOR)
        self._rows: dict[int, int] = {}
        """Number of each layer among those that share the slots: in their order, or as they come if only some do."""
        self._key_RE = np.zeros((layers, shape.experts), dtype=np.int64)
        self._held_RE = np.zeros((layers, shape.experts), dtype=bool)
        self._score_RE = np.zeros((layers, shape.experts), dtype=np.float32)
        self._waiting: dict[int, list[Sequence[int]]] = {}
        """Visits of layers that are not scored yet, by row."""
        self._visits = 0
        """Largest number of visits of a layer in the running pass."""
        self._unscored: set[int] = set()
        """Experts that these visits used, which are evicted last."""
        self._order: deque[int] = deque()
        """Keys in the order of eviction as of the last scores; some may have lost their slots."""
        self._pass = 0
        for layer in range(shape.layers if layers == shape.layers else 0):
            self._row(layer)

    def start_pass(self, fresh: bool) -> None:
        self._visit()
        if self._visits == 1:
            self._model.learn(slice(len(self._rows)))
        self._model.end_pass(self._visits)
        self._visits = 0
        self._pass += 1

    def see_routing(self, layer: int, experts: Sequence[Sequence[int]]) -> None:
        self._waiting[self._row(layer)] = [*experts]

    def start_layer(self, layer: int, keys: Sequence[int]) -> None:
        if keys:  # those of a prompt wait already, token by token
            self._waiting.setdefault(self._row(layer), [[key - layer * self.shape.experts for key in keys]])
        self._unscored.update(keys)
        if len(self._waiting) * _PARTS >= len(self._held_RE):
            self._visit()

    def insert(self, key: int, full: bool = True) -> None:
        layer, expert = divmod(key, self.shape.experts)
        self._held_RE[self._row(layer), expert] = True

    def use(self, keys: Sequence[int]) -> None:
        """Do nothing: scores do not depend on which experts are resident."""

    def remove(self, key: int) -> None:
        layer, expert = divmod(key, self.shape.experts)
        self._held_RE[self._rows[layer], expert] = False

    def clear(self) -> None:
        self._held_RE[:] = False
        self._order.clear()

    def victim(self, protected: Container[int]) -> int | None:
        for count in (0, _NEAREST, self._held_RE.size):
            if count:
                self._sort(count)
            if (found := self._first(protected)) is not None:
                return found
        self._unscored.clear()
        return self._first(protected)

    def _first(self, protected: Container[int]) -> int | None:
        """Return the first key in the order that is resident and not protected; drop those before it without a slot."""
        order, held_RE, experts = self._order, self._held_RE, self.shape.experts
        while order and not held_RE[self._rows[order[0] // experts], order[0] % experts]:
            order.popleft()
        free = (key for key in order if key not in protected and key not in self._unscored)
        return next((key for key in free if held_RE[self._rows[key // experts], key % experts]), None)

    def _sort(self, count: int) -> None:
        """Put the residents of the lowest scores in order, `count` of them or all."""
        held = np.flatnonzero(self._held_RE)
        score = self._score_RE.ravel()[held]
        if count < len(held):
            lowest = np.argpartition(score, count - 1)[:count]
            held, score = held[lowest], score[lowest]
        self._order = deque(self._key_RE.ravel()[held[np.argsort(score, kind="stable")]].tolist())

    def _row(self, layer: int) -> int:
        if layer not in self._rows:
            self._key_RE[len(self._rows)] = layer * self.shape.experts + np.arange(self.shape.experts)
            self._rows[layer] = len(self._rows)
        return self._rows[layer]

    def _visit(self) -> None:
        """Note the visits that wait, and score their layers. Learn from the tokens of a prompt one by one.

        A layer with fewer visits than others, as the last one may run for the last token only, has the last ones.
        """
        longest = max(map(len, self._waiting.values()), default=0)
        visits = self._visits = max(self._visits, longest)
        for number in range(visits - longest, visits):
            rows = sorted(row for row, waiting in self._waiting.items() if number + len(waiting) >= visits)
            for _, run in itertools.groupby(enumerate(rows), lambda placed: placed[1] - placed[0]):
                own = [row for _, row in run]
                span = slice(own[0], own[-1] + 1)
                odds_NE = self._model.visit(own[0], [self._waiting[row][number - visits] for row in own], number)
                if visits > 1:
                    self._model.learn(span, number)
                self._score_RE[span] = odds_NE - _LEAD * (self._pass + np.array(own)[:, None] / len(self._held_RE))
        self._waiting.clear()
        self._unscored.clear()
        self._order.clear()
