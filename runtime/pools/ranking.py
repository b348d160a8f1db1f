"""Experts of one layer by how often they were used: the runtime frequency list (ZipMoE, section 3.4)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from expertcast.predictors.errors import ExpertcastError

FADE = 0.97
"""What a use still counts after one step of its layer: half after 23 steps. Recorded routing drifts from what it was at
the start of a text, so that plain counts (a fade of 1, as in the paper) keep experts that are over."""
_LARGEST = 1e100


class Ranking:
    """Counts of one layer's experts, which fade, and their order.

    A count is O(log E) comparisons; of equals the expert with the smaller number ranks first.

    Raises:
        ExpertcastError: a fade of 0 or less, or of more than 1.
    """

    def __init__(self, experts: int, fade: float = FADE) -> None:
        if not 0 < fade <= 1:
            raise ExpertcastError(f"fade={fade}: give a number above 0 and up to 1")
        self._fade, self._gain = fade, 1.0
        self._entries = [(0.0, expert) for expert in range(experts)]
        """By expert; the number is below zero, so that the order is the natural one."""
        self._order = list(self._entries)

    def use(self, experts: Sequence[int]) -> None:
        """One step of the layer, with distinct experts."""
        self._gain /= self._fade
        if self._gain > _LARGEST:
            self._rescale()
        for expert in experts:
            entry = self._entries[expert]
            del self._order[bisect_left(self._order, entry)]
            entry = self._entries[expert] = (entry[0] - self._gain, expert)
            insort(self._order, entry)

    def rank(self, expert: int) -> int:
        """0 for the one used most."""
        return bisect_left(self._order, self._entries[expert])

    def entry(self, expert: int) -> tuple[float, int]:
        """What orders experts: the one used most has the smallest."""
        return self._entries[expert]

    def _rescale(self) -> None:
        self._entries = [(score / self._gain, expert) for score, expert in self._entries]
        self._order = sorted(self._entries)
        self._gain = 1.0
