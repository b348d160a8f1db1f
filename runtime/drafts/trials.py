"""Which of those that are not the best is tried again, and when."""

from __future__ import annotations

from collections.abc import Iterable

LOSS = 0.015
"""Share of all seconds that trying may lose."""
FIRST_PAUSE = 8
"""Cycles from one trial to the next; twice as many after every trial that found nothing better than was known."""
BETTER = 1.1
"""A trial that finds so much more than was known is followed by another soon."""


class Trials:
    """Keeps account of what trials cost; those that are tried go by name."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Of all cycles so far."""
        self.lost_s = 0.0
        """What trials took beyond what the best would have taken for the same tokens."""
        self._cycle = 0
        self._pauses: dict[str, int] = {}
        self._due: dict[str, int] = {}

    def spent(self, seconds: float) -> None:
        """A cycle was run, of whatever kind."""
        self.seconds += seconds
        self._cycle += 1

    def lost(self, seconds: float) -> None:
        """A trial took so much more than the best would have; less, if it was better."""
        self.lost_s = max(0.0, self.lost_s + seconds)

    def next(self, others: Iterable[tuple[str, float, float]]) -> str | None:
        """Who is tried now; None: nobody.

        Args:
            others: name, expected seconds of a trial and how many of these are lost, of all that are not the best.
                Nothing is lost by one that may be better than the best: it is tried until that is settled.
        """
        for name, seconds, loss_s in sorted(others, key=lambda other: other[2]):
            if name not in self._due:
                self._due[name] = self._cycle + self._pauses.setdefault(name, FIRST_PAUSE)
            due = loss_s < 0 or self._cycle >= self._due[name]
            if due and self.lost_s + max(0.0, loss_s) <= LOSS * (self.seconds + seconds):
                return name
        return None

    def tried(self, name: str, gain: float) -> None:
        """A trial is over.

        Args:
            name: who was tried.
            gain: tokens per second that it is believed to give now, over what it was believed to give before.
        """
        pause = FIRST_PAUSE if gain >= BETTER else 2 * self._pauses.get(name, FIRST_PAUSE)
        self._pauses[name], self._due[name] = pause, self._cycle + pause

    def won(self, name: str) -> None:
        """It is the best: when it no longer is, its pause begins anew."""
        self._pauses.pop(name, None)
        self._due.pop(name, None)
