"""A running mean that forgets, with its standard error."""

from __future__ import annotations

import math


class FadingMean:
    """Mean of what was added, the last `memory` values most: all count alike until there are so many."""

    __slots__ = ("_memory", "_squares", "_weights", "count", "mean")

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0
        """Weighted mean of squares about the mean."""
        self._weights = 1.0
        """Sum of the squared weights: 1 / how many values the mean is worth."""

    def add(self, value: float) -> None:
        """Take a value."""
        self.count += 1
        share = max(1 / self.count, 1 / self._memory)
        off = value - self.mean
        self.mean += share * off
        self._squares = (1 - share) * (self._squares + share * off * off)
        self._weights = (1 - share) ** 2 * self._weights + share * share

    @property
    def error(self) -> float:
        """Standard error of the mean, as if the values were independent; infinite for fewer than two."""
        if self.count < 2:
            return math.inf
        return math.sqrt(self._squares / (1 - self._weights) * self._weights)
