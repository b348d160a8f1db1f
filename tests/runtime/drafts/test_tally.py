"""What drafts wrote and what of it stood, counted exactly."""

from __future__ import annotations

from expertcast.runtime.drafts.costs import Cycle
from expertcast.runtime.drafts.governor import DraftCount, Tally


def test_counts_by_draft() -> None:
    tally, told = Tally(), list[Cycle]()
    observe = tally.beside(told.append)
    cycles = [
        Cycle(draft=None),
        Cycle(draft="int4", drafted=4, accepted=(4, 1)),
        Cycle(draft="int4", drafted=3, accepted=(3, 2), known=(3, 1)),
        Cycle(draft="resident", drafted=2, accepted=(0,)),
    ]
    for cycle in cycles:
        observe(cycle)
    assert told == cycles
    assert tally.by_draft == {
        "int4": DraftCount(cycles=2, drafted=8 + 2, accepted=5 + 1),
        "resident": DraftCount(cycles=1, drafted=2, accepted=0),
    }
