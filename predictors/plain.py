"""Results as plain values, and as text tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]
"""A JSON object: numbers, texts, booleans, None, and lists and objects of these."""


def aligned(rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A text table of rows of equally many cells, the heading first: two spaces between its columns, of which the first
    `left` ones stand to the left in their width, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    turns = [str.ljust if column < left else str.rjust for column in range(len(widths))]
    lines = [[turn(cell, width) for turn, cell, width in zip(turns, row, widths, strict=True)] for row in rows]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def size_text(count: float) -> str:
    """Bytes with their unit, such as 1.23 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
