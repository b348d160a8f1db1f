"""Least frequently used (row A13)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Sequence
from typing import ClassVar

from expertcast.runtime.policies.eviction.base import EvictionPolicy
from expertcast.runtime.policies.eviction.victims import VictimHeap
from expertcast.runtime.policies.registry import CacheShape, PolicyConfig


class LFU(EvictionPolicy):
    """Gives up the expert that was used least often since the start; ties by LRU. O(log n).

    The count goes on where it was when an expert comes back. A use is one step of its layer, however many tokens.
    """

    name: ClassVar[str] = "lfu"

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._uses: defaultdict[int, int] = defaultdict(int)
        self._heap = VictimHeap()
        self._clock = 0

    def insert(self, key: int, full: bool = True) -> None:
        self._access(key)

    def use(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._uses[key] += 1
            self._access(key)

    def remove(self, key: int) -> None:
        self._heap.discard(key)

    def clear(self) -> None:
        self._heap.clear()

    def victim(self, protected: Container[int]) -> int | None:
        return self._heap.lowest(protected)

    def _access(self, key: int) -> None:
        self._clock += 1
        self._heap.put(key, self._uses[key], self._clock)
