"""Least high-precision used (row A14)."""

from __future__ import annotations

from collections.abc import Sequence

from expertcast.runtime.policies.eviction.lfu import LFU
from expertcast.runtime.policies.registry import CacheShape, PolicyConfig


class LHU(LFU):
    """LFU that counts only uses while the expert was held in the model's own precision; without copies in a lower one
    it is LFU."""

    name = "lhu"

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._full: set[int] = set()
        """Experts that came in the model's own precision when they came last."""

    def insert(self, key: int, full: bool = True) -> None:
        (self._full.add if full else self._full.discard)(key)
        self._access(key)

    def use(self, keys: Sequence[int]) -> None:
        for key in keys:
            if key in self._full:
                self._uses[key] += 1
            self._access(key)
