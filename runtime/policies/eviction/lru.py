"""Least recently used (row A12)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence

from expertcast.runtime.policies.eviction.base import EvictionPolicy
from expertcast.runtime.policies.registry import CacheShape, PolicyConfig


class LRU(EvictionPolicy):
    """Gives up the expert that was not used for the longest time. Every operation is O(1)."""

    name = "lru"

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._order: OrderedDict[int, None] = OrderedDict()

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
