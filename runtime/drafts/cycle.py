"""What a cycle of drafting and verifying was, and what is chosen for the next one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """One cycle as it was run: n drafted positions, verified in one exact pass; a plain step where nothing drafts.

    All seconds are of the model's thread. B sequences.
    """

    draft: str | None
    """None: a plain exact step."""
    drafted: int = 0
    """n; fewer than were asked for where the governor stopped, or the draft had no more."""
    accepted: tuple[int, ...] = ()
    """[B] leading drafted positions that stay, 0 to n."""
    known: tuple[int, ...] = ()
    """[B] leading positions that were certain before, and are not judged; empty: none."""
    ended: bool = False
    """The draft had nothing to offer beyond its n positions, though more were asked for."""
    passes_s: tuple[float, ...] = ()
    """Each draft pass; one for all positions where they are proposed together. The first may feed several tokens."""
    verify_s: float = 0.0
    """The exact pass, with its waiting."""
    waited_s: float = 0.0
    """What the exact pass waited for copies."""
    growth: tuple[int, ...] = ()
    """New experts by position as the buffer counted them; fewer than n, or none, where routing is not known."""
    emitted: float = 1.0
    """New tokens, the mean over sequences."""
    seconds: float | None = None
    """The whole cycle, with what is neither drafting nor verifying; None: these two alone."""

    @property
    def total_s(self) -> float:
        """Seconds of the whole cycle."""
        return sum(self.passes_s) + self.verify_s if self.seconds is None else self.seconds


@dataclass(frozen=True, slots=True)
class Choice:
    """What the next cycle is to be."""

    draft: str | None
    """None: a plain exact step."""
    length: int
    """Positions that are expected to be best; 0 without a draft."""
    longest: int
    """The draft may go on up to here."""
    rate: float
    """Tokens per second and sequence that the run is believed to give at its best; 0 before anything is known."""
    reason: str
    """One line with the numbers that it was chosen by."""
    trial: bool = False
    """Run to learn what it does, not because it is best: it is drafted to its length, no less and no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """Who decides on a generation's cycles."""

    choose: Callable[[int], Choice]
    """Gets the most tokens that may be drafted."""
    goes_on: Callable[[], bool]
    """Asked after each drafted token."""
    observe: Callable[[Cycle], None]
    optional: bool = False
    """Whether a model that cannot be drafted for is decoded plainly, not refused."""
