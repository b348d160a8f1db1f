"""Experts whose copy is expected to save more waiting than it costs.

E routed experts per layer, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.policies.prefetch.base import PrefetchPolicy, Transfer, Wanted
from expertcast.runtime.policies.prefetch.calibration import Array, Calibration
from expertcast.runtime.policies.registry import CacheShape, PolicyConfig

EVICTION = ("wrong", "always")


@dataclass(frozen=True, kw_only=True)
class ValueConfig(PolicyConfig):
    """What is never worth a copy, and what an eviction costs."""

    least: float = 0.02
    """Experts that are less likely to be used than this are never loaded, whatever room there is."""
    eviction: str = "wrong"
    """When the evicted expert is charged for: for a wrong one only, as a miss would have evicted as well (wrong), or
    for every copy (always)."""

    def __post_init__(self) -> None:
        if not 0.0 < self.least < 1.0:
            raise ExpertcastError(f"least={self.least}: give a probability between 0 and 1")
        if self.eviction not in EVICTION:
            raise ExpertcastError(f"unknown eviction={self.eviction!r}: choose from {', '.join(EVICTION)}")


class Value(PrefetchPolicy):
    """Loads the likeliest experts first, for as long as the next one's copy is worth it.

    A copy of `copy_s` seconds that begins after a backlog of b seconds, for a layer that asks in `left_s`, saves
    copy_s - max(0, b + copy_s - left_s) seconds of waiting (at least 0: a copy that has not begun by then is no worse
    than a miss, which overtakes it) if the expert is used. All copies move equally many bytes, so seconds per copy rank
    them as seconds per byte do. Against the expected saving stand

    - the expert that is evicted: the probability that it is used times copy_s where the copy is wrong, nothing for a
      free slot;
    - a copy that is wrong and still under way when the layer asks: the link cannot be taken from it, and it holds up
      whatever is missed next by what is left of it. This is charged in full: a copy longer than a layer goes on into
      the layers after it, whose misses nobody has forecast yet. A copy that is only queued is dropped.

    On a link too slow for the time that is left nothing but near certainties are worth it, and nothing at all where
    `left_s` is over before a copy could begin. What is not counted: with forecasts several layers ahead, a copy may
    also hold up the layers in between; and the use of an expert after this step.

    Where parts of experts are kept in memory, each has seconds of its own: one that only has to be decoded is worth it
    where one that must be read is not.

    The forecast's own experts that are resident are named as well, so that they are protected.
    """

    name = "value"
    config_class = ValueConfig
    config: ValueConfig
    reads_transfer = True

    def __init__(self, config: ValueConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._calibration = Calibration(shape.top_k)

    def experts(self, wanted: Wanted, transfer: Transfer | None) -> list[int]:
        assert transfer is not None, "reads_transfer asks for it"
        p_E = self._calibration.probability(wanted.layer, wanted.forecast.logits_TE, wanted.forecast.log_odds)
        own = {expert for row in wanted.ids for expert in row}
        named = [expert for expert in own if transfer.resident(expert)]
        named += self._worth_loading(p_E, transfer)
        return sorted(named, key=lambda expert: (-p_E[expert], expert))

    def see_routing(self, layer: int, ids: Sequence[int]) -> None:
        self._calibration.learn(layer, ids)

    def _worth_loading(self, p_E: Array, transfer: Transfer) -> list[int]:
        if transfer.left_s <= transfer.backlog_s:
            return []
        likely = [int(expert) for expert in np.argsort(-p_E, kind="stable") if p_E[expert] >= self.config.least]
        absent = [expert for expert in likely if not transfer.resident(expert)]
        worth = transfer.victim_worth() if len(absent) > transfer.free else 0.0
        chosen: list[int] = []
        backlog_s = transfer.backlog_s
        for expert in absent:
            p, copy_s = float(p_E[expert]), transfer.seconds(expert)
            lost_s = worth * transfer.copy_s if len(chosen) >= transfer.free else 0.0
            if self.config.eviction == "wrong":
                lost_s *= 1.0 - p
            if saved_s(p, backlog_s, copy_s, transfer.left_s) > lost_s:
                chosen.append(expert)
                backlog_s += copy_s
            elif transfer.seconds_of is None:
                break  # probabilities fall and the backlog grows: none after it is worth it
        return chosen


def saved_s(p: float, backlog_s: float, copy_s: float, left_s: float) -> float:
    """Seconds of waiting that a copy is expected to save.

    Args:
        p: probability that the expert is used.
        backlog_s: until the copy would begin.
        copy_s: that it takes.
        left_s: until its layer asks.
    """
    if backlog_s >= left_s:
        return 0.0
    late_s = max(0.0, backlog_s + copy_s - left_s)
    return p * (copy_s - late_s) - (1.0 - p) * late_s
