"""Which of those that are not the best is tried again, and when."""

from __future__ import annotations

from collections.abc import Iterable

LOSS = 0.0075
"""Share of all seconds that trying again may lose; the first cycles, when nothing is known, are not counted."""
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

    def next(self, others: Iterable[tuple[str, float, float, bool]]) -> str | None:
        """Who is tried now; None: nobody. What is expected to gain needs no means.

        Args:
            others: of all that are not the best, name, expected seconds of a trial, how many of these are lost, and
                whether it may be better than the best for all that is known: then it waits for no pause.
        """
        for name, seconds, loss_s, hopeful in sorted(others, key=lambda other: other[2]):
            if name not in self._due:
                self._due[name] = self._cycle + self._pauses.setdefault(name, FIRST_PAUSE)
            due = hopeful or self._cycle >= self._due[name]
            if due and (loss_s < 0 or self.lost_s + loss_s <= LOSS * (self.seconds + seconds)):
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
