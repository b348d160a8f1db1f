"""What became of the tokens that drafts wrote, counted by draft from the first cycle on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from expertcast.runtime.drafts.cycle import Cycle


@dataclass(slots=True)
class DraftCount:
    """Of one draft; tokens are those of all sequences together."""

    cycles: int = 0
    drafted: int = 0
    """Tokens that were verified; those that were certain before are none."""
    accepted: int = 0
    """Of these, those that stand."""


class Tally:
    """Counts cycles; what it counted is never set back."""

    def __init__(self) -> None:
        self.by_draft: dict[str, DraftCount] = {}
        """Those that were run."""

    def observe(self, cycle: Cycle) -> None:
        """A cycle was run; plain steps count for nothing."""
        if cycle.draft is None:
            return
        count = self.by_draft.setdefault(cycle.draft, DraftCount())
        count.cycles += 1
        known = cycle.known or (0,) * len(cycle.accepted)
        for kept, certain in zip(cycle.accepted, known, strict=True):
            count.drafted += cycle.drafted - certain
            count.accepted += kept - certain

    def beside(self, told: Callable[[Cycle], None]) -> Callable[[Cycle], None]:
        """Both are told of a cycle, the other one first."""

        def observe(cycle: Cycle) -> None:
            told(cycle)
            self.observe(cycle)

        return observe
