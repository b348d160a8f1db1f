"""Least frequently and recently used.

Source: 2608.07911 compares it with Belady's bound in an event-atomic replay. The score, uses over age, is that of
tinyserve, whose author named it (vLLM pull request 37190), and what others read in 2608.07911's released replay.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence

from expertcast.runtime.policies.eviction.base import EvictionPolicy
from expertcast.runtime.policies.registry import CacheShape, PolicyConfig


class LFRU(EvictionPolicy):
    """Gives up the expert with the lowest f / (now - last + 1); ties by f, then by LRU.

    f counts its uses since the start and goes on where it was when an expert comes back; the clock counts layers that
    ran, of those that this policy rules over. An insertion that no use follows (a prefetch) sets `last` alone. Of
    experts with equal f the one accessed longest ago is lowest, so a decision looks at one expert per count there is.
    """

    name = "lfru"

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._uses: dict[int, int] = {}
        self._clock = 0
        self._by_uses: dict[int, OrderedDict[int, int]] = {}
        """Residents with the clock of their last access, least recent first, by their count."""

    def start_layer(self, layer: int, keys: Sequence[int]) -> None:
        self._clock += 1

    def insert(self, key: int, full: bool = True) -> None:
        self._by_uses.setdefault(self._uses.get(key, 0), OrderedDict())[key] = self._clock

    def use(self, keys: Sequence[int]) -> None:
        for key in keys:
            self.remove(key)
            self._uses[key] = self._uses.get(key, 0) + 1
            self.insert(key)

    def remove(self, key: int) -> None:
        uses = self._uses.get(key, 0)
        ages = self._by_uses[uses]
        del ages[key]
        if not ages:
            del self._by_uses[uses]

    def clear(self) -> None:
        self._by_uses.clear()

    def victim(self, protected: Container[int]) -> int | None:
        lowest: tuple[float, int] | None = None
        found = None
        for uses, ages in self._by_uses.items():
            for key, last in ages.items():
                if key not in protected:
                    score = (uses / (self._clock - last + 1), uses)
                    if lowest is None or score < lowest:
                        lowest, found = score, key
                    break
        return found
