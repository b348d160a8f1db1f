"""Least frequently used (row A13)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from expertcast.runtime.policies.eviction.victims import ByPriority
from expertcast.runtime.policies.registry import CacheShape, PolicyConfig


class LFU(ByPriority):
    """Gives up the expert that was used least often since the start; ties by LRU. O(log n).

    The count goes on where it was when an expert comes back. A use is one step of its layer, however many tokens.
    """

    name = "lfu"

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._uses: defaultdict[int, int] = defaultdict(int)

    def use(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._uses[key] += 1
            self._access(key)

    def _priority(self, key: int) -> float:
        return self._uses[key]
