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
        order = (key for group in sorted(self._groups) for key in self._groups[group])
        return next((key for key in order if key not in protected), None)

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

    An access is a copy or a use and takes O(log n). `victim` takes O(log n) on average per protected expert that it
    passes.
    """

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._heap: list[_Entry] = []
        """Entries that are no longer in `_valid` stay until they reach the top."""
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
        self._valid.clear()

    def victim(self, protected: Container[int]) -> int | None:
        """Raise outdated entries at the top of the heap first: a priority may rise between two accesses."""
        heap, passed = self._heap, list[_Entry]()
        found = None
        while heap and found is None:
            entry = heap[0]
            key = entry[2]
            if self._valid.get(key) is not entry:
                heapq.heappop(heap)
            elif (now := self._priority(key)) > entry[0]:
                self._valid[key] = (now, entry[1], key)
                heapq.heapreplace(heap, self._valid[key])
            elif key in protected:
                passed.append(heapq.heappop(heap))
            else:
                found = key
        for entry in passed:
            heapq.heappush(heap, entry)
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
    """Scores of the experts of a layer: value * scale + offset, comparable between layers."""

    value_E: Sequence[float]
    """Values that order the experts within the layer [E]."""
    scale: float = 1.0
    """Factor; 0 if all experts of the layer have the same score."""
    offset: float = 0.0

    def of(self, expert: int) -> float:
        """Return the score of an expert (0..E-1)."""
        return self.value_E[expert] * self.scale + self.offset


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
        self._scores = [Scores([0.0] * shape.experts) for _ in range(shape.layers)]
        """Scores that the current rankings follow."""
        self._lowest = [math.inf] * shape.layers
        """Score of the first expert of each ranking."""

    @abstractmethod
    def _score(self, layer: int) -> Scores:
        """Return the scores of a layer's experts; the lowest is evicted first."""

    def insert(self, key: int, full: bool = True) -> None:
        layer, expert = divmod(key, self.shape.experts)
        if layer in self._changed:
            self._ranking[layer].append(expert)
        else:
            bisect.insort_right(self._ranking[layer], expert, key=self._scores[layer].value_E.__getitem__)
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
            self._ranking[layer].sort(key=scores.value_E.__getitem__)
            self._note_lowest(layer)
        self._changed.difference_update(outdated)
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


class LRU(ByRecency):
    """Evicts the least recently accessed expert. Every operation is O(1)."""

    name = "lru"

    def _group(self, key: int) -> int:
        return 0


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
        super().insert(key, full)

    def remove(self, key: int) -> None:
        super().remove(key)
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

    def _score(self, layer: int) -> Scores:
        sums_E = self._sums[layer]
        return Scores(sums_E, 1 / (max(sums_E) or 1.0))


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
# experts of a visit. A visit is one token at one layer, or one step of several sequences. Column E is of no expert: it
# fills rows of unequal length.
#
# Source: this project.

Numbers = npt.NDArray[np.floating]
Ids = npt.NDArray[np.int64]

HALF_LIVES = (8, 1, 2, 4, 16, 32, 64)
"""Half-lives of the averages of use, in visits; before learning, the forecast is the first average."""
_DECAY_H1 = np.array([[0.5 ** (1 / half_life)] for half_life in HALF_LIVES], dtype=np.float32)
_PAIR_PRIOR = 4.0
"""Weight, in visits, of an expert's overall rate in the estimate of its rate after another expert."""
_MAX_AGE = 200
_LOG_AGE = np.log1p(np.arange(_MAX_AGE + 1), dtype=np.float32) - 2
_HALVING_PERIOD = 4096
"""Number of visits of a layer after which all counts are halved, so that they stay bounded."""
FEATURES = len(HALF_LIVES) + 6
"""Number of features, F."""


def _span(rows: Sequence[int]) -> slice | Ids:
    """Return ascending rows, as a slice if they are consecutive: numpy need not copy that."""
    consecutive = rows[-1] - rows[0] + 1 == len(rows)
    return slice(rows[0], rows[-1] + 1) if consecutive else np.array(rows)


class UsageModel:
    """Online logistic regression of whether an expert is used within the next `horizon` visits of its layer.

    All layers share the weights. Each visit labels the features of `horizon` visits ago, and the weights take one
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
        self._experts, self._share, self._horizon = experts, top_k / experts, horizon
        self._visits_R = np.zeros(layers, dtype=np.int64)
        self._average_RHE = np.zeros((layers, len(HALF_LIVES), experts), dtype=np.float32)
        self._weight_RH1 = np.zeros((layers, len(HALF_LIVES), 1), dtype=np.float32)
        self._counted_R1 = np.zeros((layers, 1), dtype=np.float32)
        self._uses_RE = np.zeros((layers, experts + 1), dtype=np.float32)
        self._uses_RE[:, experts] = np.inf
        self._last_RE = np.full((layers, experts), -_MAX_AGE)
        self._followed_REE = np.zeros((layers, experts + 1, experts + 1), dtype=np.float32)
        """Number of visits that used the second expert directly after a visit that used the first."""
        self._before: list[Sequence[int]] = [()] * layers
        """Experts of each layer's last visit."""
        self._used = np.zeros((horizon, layers, experts + 1), dtype=bool)
        """Use in each of the last visits; visit i is at i modulo the horizon."""
        self._x = np.empty((horizon, layers, FEATURES, experts), dtype=np.float32)
        """Features before each of these visits."""
        self._x[0] = 0.0
        self._x[0, :, [0, -1]] = 1.0
        self._x[0, :, -3] = _LOG_AGE[_MAX_AGE]
        self._weight_F = np.zeros(FEATURES)
        self._weight_F[:2] = np.log(min(0.5, horizon * top_k / experts)), 1.0
        self._precision_FF = np.eye(FEATURES) * prior

    def visit(self, layers: Sequence[int], experts: Sequence[Sequence[int]]) -> Numbers:
        """Learn from one visit of each of some layers.

        Args:
            layers: distinct layers (0..R-1), ascending.
            experts: distinct experts (0..E-1) that each of them used.

        Returns:
            Log-odds of a use within the horizon [N, E].
        """
        rows_N, used_NK, span = np.array(layers), self._filled(experts), _span(layers)
        slot_N = self._visits_R[span] % self._horizon
        self._used[slot_N, rows_N] = False
        self._used[slot_N[:, None], rows_N[:, None], used_NK] = True
        self._visits_R[span] += 1
        next_N = self._visits_R[span] % self._horizon
        ready_N = self._visits_R[span] >= self._horizon
        if ready_N.any():
            self._learn(self._x[next_N, rows_N][ready_N], self._used[:, span, :-1].max(axis=0)[ready_N])
        self._count(rows_N, span, used_NK, self._used[slot_N, rows_N, :-1])
        for layer, own in zip(layers, experts, strict=True):
            self._before[layer] = own
        x_NFE = self._x[next_N, rows_N] = self._features(rows_N, span, used_NK)
        odds_NE: Numbers = self._weight_F.astype(np.float32) @ x_NFE
        return odds_NE

    def _filled(self, experts: Sequence[Sequence[int]]) -> Ids:
        filled = list(itertools.zip_longest(*experts, fillvalue=self._experts))
        return np.array(filled, dtype=np.int64).reshape(-1, len(experts)).T

    def _count(self, rows_N: Ids, span: slice | Ids, used_NK: Ids, used_NE: npt.NDArray[np.bool_]) -> None:
        before_NK = self._filled([self._before[row] for row in rows_N.tolist()])
        self._followed_REE[rows_N[:, None, None], before_NK[:, :, None], used_NK[:, None, :]] += 1
        self._average_RHE[span] *= _DECAY_H1
        self._average_RHE[span] += used_NE[:, None]
        self._weight_RH1[span] = self._weight_RH1[span] * _DECAY_H1 + 1
        self._uses_RE[rows_N[:, None], used_NK] += 1
        self._counted_R1[span] += 1
        self._last_RE[span] = np.where(used_NE, self._visits_R[span, None], self._last_RE[span])
        old_N = rows_N[self._visits_R[span] % _HALVING_PERIOD == 0]
        if len(old_N):
            for counts in (self._uses_RE, self._counted_R1, self._followed_REE):
                counts[old_N] /= 2

    def _features(self, rows_N: Ids, span: slice | Ids, used_NK: Ids) -> Numbers:
        """Return the features of each expert [N, F, E].

        In order: a constant; the log of each decayed average of use and of the share of all visits, relative to chance;
        the log of how much more often than usual it follows the experts of the last visit; the log of the age; whether
        the last visit used the expert; whether no visit did.
        """
        share, heads, experts = self._share, len(HALF_LIVES), self._experts
        x_NFE = np.empty((len(rows_N), FEATURES, experts), dtype=np.float32)
        x_NFE[:, 0] = 1.0
        x_NFE[:, 1 : heads + 1] = (self._average_RHE[span] / share + 1) / (self._weight_RH1[span] + 1)
        rate_NE = x_NFE[:, heads + 1] = (self._uses_RE[span, :-1] / share + 1) / (self._counted_R1[span] + 1)
        per_use_NK = 1 / (np.maximum(self._uses_RE[rows_N[:, None], used_NK] - 1, 0) + _PAIR_PRIOR)
        followed_NE = (per_use_NK[:, None] @ self._followed_REE[rows_N[:, None], used_NK])[:, 0, :-1]
        count_N1 = np.maximum((used_NK < experts).sum(1, keepdims=True), 1)
        usual_N1 = _PAIR_PRIOR * per_use_NK.sum(1, keepdims=True)
        x_NFE[:, heads + 2] = (followed_NE / (rate_NE * share) + usual_N1) / count_N1
        np.log(x_NFE[:, 1 : heads + 3], out=x_NFE[:, 1 : heads + 3])
        age_NE = np.minimum(self._visits_R[span, None] - self._last_RE[span], _MAX_AGE)
        x_NFE[:, heads + 3] = _LOG_AGE[age_NE]
        x_NFE[:, heads + 4] = age_NE == 0
        x_NFE[:, heads + 5] = self._uses_RE[span, :-1] == 0
        return x_NFE

    def _learn(self, x_NFE: Numbers, used_NE: npt.NDArray[np.bool_]) -> None:
        odds_NE = self._weight_F.astype(np.float32) @ x_NFE
        chance_NE = 1 / (1 + np.exp(-np.clip(odds_NE, -30, 30)))
        x_FM = x_NFE.transpose(1, 0, 2).reshape(FEATURES, -1)
        self._precision_FF += (x_FM * (chance_NE * (1 - chance_NE)).ravel()) @ x_FM.T
        self._weight_F = self._weight_F + np.linalg.solve(self._precision_FF, x_FM @ (used_NE - chance_NE).ravel())


_MAX_HORIZON = 8
_PARTS = 8
"""Number of parts of a pass after each of which the layers that ran in it are scored again, all at once."""
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
    learns from the tokens of the prompt on. Eight times per pass, all layers that ran since are scored at once; until
    then the experts that they used are evicted last. A pass takes O(R E F^2), and memory is constant.
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
        """Number of each layer among those that share the slots."""
        self._layers: list[int] = []
        self._held_RE = np.zeros((layers, shape.experts), dtype=bool)
        self._score_RE = np.zeros((layers, shape.experts))
        self._waiting: dict[int, list[Sequence[int]]] = {}
        """Visits of layers that are not scored yet, by row."""
        self._unscored: set[int] = set()
        """Experts that these visits used, which are evicted last."""
        self._part = -(-layers // _PARTS)
        self._order: deque[int] = deque()
        """Keys in the order of eviction as of the last scores; some may have lost their slots."""
        self._prompt_layer = -1
        """Layer whose prompt `see_routing` has learned from token by token."""
        self._pass = 0

    def start_pass(self, fresh: bool) -> None:
        self._pass += 1

    def see_routing(self, layer: int, experts: Sequence[Sequence[int]]) -> None:
        self._prompt_layer = layer
        self._waiting.setdefault(self._row(layer), []).extend(experts)

    def start_layer(self, layer: int, keys: Sequence[int]) -> None:
        if keys and self._prompt_layer != layer:
            experts = [key - layer * self.shape.experts for key in keys]
            self._waiting.setdefault(self._row(layer), []).append(experts)
        self._prompt_layer = -1
        self._unscored.update(keys)
        if len(self._waiting) >= self._part:
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
        found = self._first(protected)
        for count in (_NEAREST, self._held_RE.size):
            if found is None:
                self._sort(count)
                found = self._first(protected)
        if found is None:
            self._unscored.clear()
            found = self._first(protected)
        return found

    def _first(self, protected: Container[int]) -> int | None:
        """Return the first key in the order that is resident and not protected; drop those before it without a slot."""
        order, held_RE, experts = self._order, self._held_RE, self.shape.experts
        while order and not held_RE[self._rows[order[0] // experts], order[0] % experts]:
            order.popleft()
        for key in order:
            if (
                key not in protected
                and key not in self._unscored
                and held_RE[self._rows[key // experts], key % experts]
            ):
                return key
        return None

    def _sort(self, count: int) -> None:
        """Put the residents of the lowest scores in order, `count` of them or all."""
        score = np.where(self._held_RE, self._score_RE, np.inf).ravel()
        count = min(count, int(self._held_RE.sum()))
        if count == 0:
            return
        lowest = np.argpartition(score, count - 1)[:count]
        lowest = lowest[np.argsort(score[lowest], kind="stable")]
        row, expert = np.divmod(lowest, self.shape.experts)
        self._order = deque((np.array(self._layers)[row] * self.shape.experts + expert).tolist())

    def _row(self, layer: int) -> int:
        if layer not in self._rows:
            self._rows[layer] = len(self._layers)
            self._layers.append(layer)
        return self._rows[layer]

    def _visit(self) -> None:
        """Learn from the visits that wait, and score their layers."""
        for number in range(max(map(len, self._waiting.values()))):
            rows = sorted(row for row, visits in self._waiting.items() if number < len(visits))
            odds_NE = self._model.visit(rows, [self._waiting[row][number] for row in rows])
            due_N1 = self._pass + np.array(rows)[:, None] / len(self._held_RE)
            self._score_RE[rows] = odds_NE - _LEAD * due_N1
        self._waiting.clear()
        self._unscored.clear()
        self._order.clear()
