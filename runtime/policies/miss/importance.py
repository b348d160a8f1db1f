"""How much a layer's output depends on an expert, on a scale that is the same for all models.

T tokens, K experts per token.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque

from expertcast.runtime.policies.miss.base import Lookup

_WINDOW = 1024


def shares(lookup: Lookup) -> dict[int, float]:
    """The largest part of any token's combine weights that each routed expert has, times K: 1 is a token's mean.

    Models scale their combine weights differently, or not at all; parts of a token's sum are alike in all of them.
    """
    best: dict[int, float] = {}
    for row, weights in zip(lookup.ids, lookup.weights, strict=True):
        scale = len(row) / (sum(weights) or 1.0)
        for expert, weight in zip(row, weights, strict=True):
            best[expert] = max(weight * scale, best.get(expert, 0.0))
    return best


class RunningRank:
    """Where a value lies among the last ones seen, in O(log n)."""

    def __init__(self, window: int = _WINDOW) -> None:
        self._window = window
        self._values: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, value: float) -> None:
        """See a value; the oldest one is forgotten when there are more than the window holds."""
        if len(self._values) == self._window:
            del self._sorted[bisect_left(self._sorted, self._values.popleft())]
        self._values.append(value)
        insort(self._sorted, value)

    def rank(self, value: float) -> float:
        """Part of the values seen that are not above it, in [0, 1]; 1 before any was seen."""
        return bisect_right(self._sorted, value) / len(self._sorted) if self._sorted else 1.0
