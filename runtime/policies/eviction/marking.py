"""Marking (Fiat et al., Competitive paging algorithms, 1991): a baseline of ZipMoE's (section 5.1; row E21)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.policies.eviction.victims import ByPriority
from expertcast.runtime.policies.registry import CacheShape, PolicyConfig


@dataclass(frozen=True, kw_only=True)
class MarkingConfig(PolicyConfig):
    seed: int = 0
    """Of the draws."""

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ExpertcastError(f"seed={self.seed}: give 0 or more")


class Marking(ByPriority):
    """Gives up an expert drawn from those that were not used in the present phase. O(log n).

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
