"""Precisions that a policy chooses among, best first."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.storage.precision import FULL, PRECISIONS, is_better


def check_levels(levels: Sequence[str], least: int, most: int = 1 + len(PRECISIONS)) -> None:
    """
    Raises:
        ExpertcastError: an unknown precision, an order other than best first, or too few or too many of them.
    """
    text, allowed = "/".join(levels), "/".join((FULL, *PRECISIONS))
    known = all(level in (FULL, *PRECISIONS) for level in levels)
    if not known or not all(is_better(*pair) for pair in pairwise(levels)):
        raise ExpertcastError(f"levels={text}: give precisions of {allowed}, best first")
    if not least <= len(levels) <= most:
        count = str(least) if least == most else f"{least} to {most}"
        raise ExpertcastError(f"levels={text}: give {count} of {allowed}, best first")


def copies_of(levels: Sequence[str]) -> tuple[str, ...]:
    """The levels that are copies beside the full experts."""
    return tuple(level for level in levels if level != FULL)
