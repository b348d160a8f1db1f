"""First in, first out: a baseline of ZipMoE's (section 5.1; row E21)."""

from __future__ import annotations

from collections.abc import Container, Sequence

from expertcast.runtime.policies.eviction.base import EvictionPolicy
from expertcast.runtime.policies.registry import CacheShape, PolicyConfig


class FIFO(EvictionPolicy):
    """Gives up the expert that has had its slot for longest, however often it was used. Every operation is O(1)."""

    name = "fifo"

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._keys: dict[int, None] = {}

    def insert(self, key: int, full: bool = True) -> None:
        self._keys[key] = None

    def use(self, keys: Sequence[int]) -> None:
        pass

    def remove(self, key: int) -> None:
        del self._keys[key]

    def clear(self) -> None:
        self._keys.clear()

    def victim(self, protected: Container[int]) -> int | None:
        return next((key for key in self._keys if key not in protected), None)
