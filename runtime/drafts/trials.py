"""Which of those that are not the best is tried again, and when."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

LOSS = 0.0075
"""Share of all seconds that trying again may lose; the first cycles, when nothing is known, are not counted."""
FIRST_PAUSE = 8
"""Cycles from one trial to the next; twice as many after every trial that found nothing better than was known."""
BETTER = 1.1
"""A trial that finds so much more than was known is followed by another soon."""
NEAR = 0.1
"""Another draft that may be better than the best, and loses this share of its seconds at most, costs nothing."""


class Candidate(NamedTuple):
    """One that is not the best."""

    name: str
    seconds: float
    """Expected, of a trial."""
    loss_s: float
    """How many of these are lost."""
    hopeful: bool
    """Whether it may be better than the best for all that is known: then it waits for no pause."""
    another: bool = True
    """Whether it is another draft than the best, not another length of it."""


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

    def next(self, others: Iterable[Candidate]) -> str | None:
        """Who is tried now; None: nobody. What is expected to gain needs no means, nor does what is as good as the best
        for all that is known: bad luck with the little that was seen of it must not keep the better one out.

        Args:
            others: all that are not the best.
        """
        for own in sorted(others, key=lambda other: other.loss_s):
            if own.name not in self._due:
                self._due[own.name] = self._cycle + self._pauses.setdefault(own.name, FIRST_PAUSE)
            due = own.hopeful or self._cycle >= self._due[own.name]
            free = own.loss_s < 0 or (own.hopeful and own.another and own.loss_s <= NEAR * own.seconds)
            if due and (free or self.lost_s + own.loss_s <= LOSS * (self.seconds + own.seconds)):
                return own.name
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
