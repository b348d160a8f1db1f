"""Recorded routing through the runtime's own books, one layer after another, with any eviction policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from expertcast.runtime.engine.cache import ExpertCache
from expertcast.runtime.links.virtual import VirtualLink
from expertcast.runtime.policies.belady import Belady
from expertcast.runtime.recording.statistics import LayerStatistics, RunStatistics
from expertcast.runtime.storage.layout import ALIGNMENT, BlockLayout, Field
from expertcast.runtime.storage.slots import SlotPool
from tests.runtime.engine.evictions import eviction

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
    """Returns the totals.

    Args:
        low: keys that are held in int4 only.
    """
    tell(residency, forwards)
    for forward in forwards:
        residency.start_pass(fresh=False)
        for layer, visit in enumerate(forward):
            step(residency, layer, visit, low)
    return residency.stats.total


def tell(residency: ExpertCache, forwards: Sequence[Sequence[Visit]]) -> None:
    """The future, to policies that need it."""
    eviction = residency.eviction
    events = [visit.needs for forward in forwards for visit in forward]
    for layer, policy in enumerate(eviction.policies):
        if isinstance(policy, Belady):
            policy.foresee(events if eviction.shares is None else events[layer :: len(forwards[0])])


def step(residency: ExpertCache, layer: int, visit: Visit, low: Sequence[int] = ()) -> None:
    """One layer of one forward."""
    eviction, keys = residency.eviction, list(visit.needs)
    if eviction.reads_scores and visit.scores:
        eviction.see_scores(layer, visit.scores)
    residency.settle(layer, keys)
    residency.request(keys, {key: "int4" for key in keys if key in low})
    if eviction.reads_forecasts and visit.forecast:
        eviction.see_forecast(layer + 1, visit.forecast)
    residency.prefetch(visit.wants)
    residency.wait(keys)
    residency.release(keys)
    assert isinstance(residency.link, VirtualLink)
    residency.link.spend(1e9)
