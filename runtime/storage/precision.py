"""Precisions that experts are held and moved in: the model's own, and those of packed copies beside it."""

from __future__ import annotations

FULL = "full"
"""The model's own precision."""
PRECISIONS = ("int8", "int4", "int2")
"""Copies that a store can hold beside it, best first."""
_ORDER = (FULL, *PRECISIONS)


def is_better(precision: str, other: str) -> bool:
    """Whether a precision is finer than another."""
    return _ORDER.index(precision) < _ORDER.index(other)
