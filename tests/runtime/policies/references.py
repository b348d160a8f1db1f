"""Reference implementations of eviction policies, and recorded routing run through the runtime's cache.

A reference sorts all residents by the documented key at each decision. L layers, E experts per layer. A key is
layer * E + expert.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

import torch

from expertcast.runtime.engine.cache import ExpertCache
from expertcast.runtime.policies.eviction import Belady
from expertcast.runtime.recording.recorder import LayerStatistics, RunStatistics
from expertcast.runtime.simulation.link import VirtualLink
from expertcast.runtime.storage.layout import ALIGNMENT, BlockLayout, Field
from expertcast.runtime.storage.slots import SlotPool
from tests.runtime.engine.evictions import eviction

Order = Callable[["History", int], tuple[float, ...]]
"""Returns the sort key of a resident; the smallest is evicted first."""


@dataclass(slots=True, kw_only=True)
class History:
    """All events of a run."""

    layers: int
    experts: int
    events: Sequence[Sequence[int]] = ()
    """Future events, for offline policies."""
    slots: int = 0
    fresh: bool = False
    """Whether the running step reads a prompt."""
    scans: bool = False
    """Whether the running layer needs more than its share of the slots, in a prompt or with most of its experts."""
    passing: set[int] = field(default_factory=set)
    """Experts that such a layer loaded when its share or all slots were full, and that no other has used since."""
    time: int = 0
    forward: int = 0
    layer: int = 0
    event: int = 0
    """Number of events started."""
    residents: dict[int, bool] = field(default_factory=dict)
    """Whether each resident is in full precision."""
    inserted: dict[int, int] = field(default_factory=dict)
    """Time of the last insertion."""
    accessed: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Time and forward of the last insertion or use."""
    wanted: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Time and forward of the last forecast for a resident."""
    uses: list[tuple[int, int, bool]] = field(default_factory=list)
    """Key, number of earlier events of its layer, and whether it was in full precision."""
    used_at: dict[int, list[float]] = field(default_factory=dict)
    """Times of each key's uses in forwards: the forward plus the layer's share of it."""
    steps: dict[int, int] = field(default_factory=dict)
    """Number of events of each layer."""
    scores: dict[int, list[Sequence[float]]] = field(default_factory=dict)
    forecast: dict[int, Sequence[float]] = field(default_factory=dict)
    learnt: list[int] = field(default_factory=list)
    """Layers in the order in which their uses, scores or forecasts changed."""

    def insert(self, key: int, full: bool) -> None:
        self.time += 1
        self.residents[key] = full
        self.inserted[key] = self.time
        self.accessed[key] = (self.time, self.forward)
        self.wanted.pop(key, None)
        held = sum(other // self.experts == key // self.experts for other in self.residents)
        full = held > self.slots / self.layers or len(self.residents) >= self.slots
        (self.passing.add if self.scans and full else self.passing.discard)(key)

    def use(self, keys: Sequence[int]) -> None:
        if not self.scans:
            self.passing.difference_update(keys)
        for key in keys:
            self.time += 1
            self.accessed[key] = (self.time, self.forward)
            self.uses.append((key, self.steps[key // self.experts], self.residents[key]))
            self.used_at.setdefault(key, []).append(self.forward + key // self.experts / self.layers)
            self.learnt.append(key // self.experts)

    def touch(self, keys: Sequence[int]) -> None:
        for key in keys:
            self.time += 1
            self.wanted[key] = (self.time, self.forward)

    def start_layer(self, layer: int, keys: Sequence[int]) -> None:
        self.layer = layer
        self.scans = len(keys) > max(self.slots / self.layers, 0 if self.fresh else 0.75 * self.experts)
        self.event += 1
        self.steps[layer] = self.steps.get(layer, 0) + 1

    def see_scores(self, layer: int, probability_E: Sequence[float]) -> None:
        self.scores.setdefault(layer, []).append(probability_E)
        self.learnt.append(layer)

    def see_forecast(self, layer: int, probability_E: Sequence[float]) -> None:
        self.forecast[layer] = probability_E
        self.learnt.append(layer)

    def victim(self, order: Order, protected: Container[int]) -> int | None:
        free = [key for key in self.residents if key not in protected]
        return min(free, key=lambda key: order(self, key), default=None)

    def ahead(self, key: int) -> int:
        """Layers that run before the key's own does again."""
        return (key // self.experts - self.layer - 1) % self.layers


def lru(history: History, key: int) -> tuple[float, ...]:
    return (history.accessed[key][0],)


def fifo(history: History, key: int) -> tuple[float, ...]:
    return (history.inserted[key],)


def lfu(history: History, key: int) -> tuple[float, ...]:
    return (sum(used == key for used, _, _ in history.uses), history.accessed[key][0])


def lrfu(history: History, key: int) -> tuple[float, ...]:
    uses = 0.0 if key in history.passing else sum(2 ** (at / 2) for at in history.used_at.get(key, []))
    return (round(uses, 9), history.inserted[key])


def lhu(history: History, key: int) -> tuple[float, ...]:
    return (sum(used == key and full for used, _, full in history.uses), history.accessed[key][0])


def _last(history: History, key: int) -> tuple[int, int]:
    return max(history.accessed[key], history.wanted.get(key, (0, 0)))


def least_stale(history: History, key: int) -> tuple[float, ...]:
    time, forward = _last(history, key)
    return (forward == history.forward, -history.ahead(key), time)


def belady(history: History, key: int) -> tuple[float, ...]:
    coming = history.events[history.event :]
    following = next((index for index, keys in enumerate(coming) if key in keys), len(coming))
    return (-following, history.accessed[key][0])


def mean_score(history: History, layer: int) -> list[float]:
    """[E] means over all steps, as shares of the highest."""
    seen = history.scores.get(layer, [])
    sums = [sum(column) for column in zip(*seen, strict=True)] if seen else [0.0] * history.experts
    return [value / (max(sums) or 1.0) for value in sums]


def importance(history: History, layer: int, alpha: float, gamma: float) -> list[float]:
    """[E] s = alpha h + (1 - alpha) p, as shares of the layer's residents (equations 8, 9, 12 and 13)."""
    first, now = layer * history.experts, history.steps.get(layer, 0)
    residents = [key - first for key in history.residents if key // history.experts == layer]
    hotness = [
        sum(gamma ** (now - step) for key, step, _ in history.uses if key == first + expert)
        for expert in range(history.experts)
    ]
    chance = list(history.forecast.get(layer, [0.0] * history.experts))
    return [
        alpha * h + (1 - alpha) * p
        for h, p in zip(_shares(hotness, residents), _shares(chance, residents), strict=True)
    ]  # fmt: skip


def _shares(values: list[float], residents: list[int]) -> list[float]:
    total = sum(values[expert] for expert in residents)
    if not total:
        return [1 / max(1, len(residents))] * len(values)
    return [value / total for value in values]


ORDERS: dict[str, Order] = {
    "lru": lru,
    "fifo": fifo,
    "lfu": lfu,
    "lrfu:half_life=2": lrfu,
    "lhu": lhu,
    "least_stale": least_stale,
    "belady": belady,
}


# Recorded routing through the cache, one layer after another

BLOCK = ALIGNMENT
"""Bytes of one expert."""
LOW = BLOCK // 4
"""Bytes of one expert in int4."""


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One layer of one forward."""

    needs: Sequence[int]
    """Keys."""
    wants: Sequence[int] = ()
    """Keys of the next layer that are prefetched; all of them have arrived when it runs."""
    scores: Sequence[float] = ()
    """The router's probabilities [E]."""
    forecast: Sequence[float] = ()
    """Probabilities [E] forecast for the next layer."""


def cache(policy: str, *, layers: int, experts: int, slots: int, top_k: int = 2, scope: str = "global") -> ExpertCache:
    """An empty cache in virtual time."""
    layout = BlockLayout(
        fields=(Field(name="block", shape=(BLOCK,), dtype=torch.uint8, offset=0),), block_bytes=BLOCK
    )  # fmt: skip
    policies = eviction(policy, layers=layers, experts=experts, slots=slots, top_k=top_k, scope=scope)
    pool = SlotPool(layout, slots, torch.device("cpu"))
    link = VirtualLink({"full": 4 * LOW, "int4": LOW}, 4.0 * LOW)
    return ExpertCache(pool, link, policies, RunStatistics(layers), experts=experts)


def run(residency: ExpertCache, forwards: Sequence[Sequence[Visit]], low: Sequence[int] = ()) -> LayerStatistics:
    """Return the totals.

    Args:
        low: keys of experts that are only available in int4.
    """
    tell(residency, forwards)
    for forward in forwards:
        residency.start_pass(fresh=False)
        for layer, visit in enumerate(forward):
            step(residency, layer, visit, low)
    return residency.stats.total


def tell(residency: ExpertCache, forwards: Sequence[Sequence[Visit]]) -> None:
    """Set the future events of offline policies."""
    eviction = residency.eviction
    events = [visit.needs for forward in forwards for visit in forward]
    for layer, policy in enumerate(eviction.policies):
        if isinstance(policy, Belady):
            policy.set_future(events[layer :: len(eviction.policies)])


def step(residency: ExpertCache, layer: int, visit: Visit, low: Sequence[int] = ()) -> None:
    """One layer of one forward."""
    eviction, keys = residency.eviction, list(visit.needs)
    if eviction.reads_scores and visit.scores:
        eviction.by_layer[layer].see_scores(layer, visit.scores)
    residency.start_layer(layer, keys)
    residency.request(keys, {key: "int4" for key in keys if key in low})
    if eviction.reads_forecasts and visit.forecast:
        eviction.by_layer[layer + 1].see_forecast(layer + 1, visit.forecast)
    residency.prefetch(visit.wants)
    residency.wait(keys)
    residency.release(keys)
    assert isinstance(residency.link, VirtualLink)
    residency.link.spend(1e9)
