"""Parts of the report's page: tables, folded parts, inlined pictures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

LOWER_IS_BETTER = {"mismatch", "ECE", "perplexity", "KL"}
NOT_RANKED = {"soft match"}
Cell = str | float | int | None


def picture(pictures: Mapping[str, str], name: str, description: str) -> str:
    """A picture inside the page; `pictures` holds base64 of PNGs by file name."""
    return f'<figure><img alt="{escape(description)}" src="data:image/png;base64,{pictures[name]}"></figure>'


def folded(heading: str, content: str) -> str:
    """Content that opens on a click."""
    return f"<details><summary>{escape(heading)}</summary>{content}</details>"


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    last: Iterable[Sequence[Cell]] = (),
    ranked: str | None = "",
    digits: int = 3,
) -> str:
    """A table; in each column the best cell is marked.

    Args:
        last: rows below the others that compete with none.
        ranked: what every column measures, "" when each column's heading says it, None to mark nothing.
    """
    rows = list(rows)
    best: list[Cell] = [None]
    for column in range(1, len(headings)):
        what = ranked or headings[column]
        values = [row[column] for row in rows if isinstance(row[column], (int, float))]
        wanted = min if what in LOWER_IS_BETTER else max
        skip = ranked is None or what in NOT_RANKED or len(values) < 2
        best.append(None if skip else wanted(values))  # type: ignore[type-var]
    lines = ["<tr>" + "".join(f"<th>{escape(heading)}</th>" for heading in headings) + "</tr>"]
    for row in rows:
        lines.append(_row(row, best, digits))
    lines.extend(_row(row, [None] * len(headings), digits) for row in last)
    return "<div class=wide><table>" + "\n".join(lines) + "</table></div>"


def _row(row: Sequence[Cell], best: Sequence[Cell], digits: int) -> str:
    cells = []
    for value, top in zip(row, best, strict=True):
        mark = " class=best" if top is not None and value == top else ""
        text = "-" if value is None else f"{value:.{digits}f}" if isinstance(value, float) else None
        cells.append(f"<td{mark}>{text or escape(f'{value:,}' if isinstance(value, int) else str(value))}</td>")
    return "<tr>" + "".join(cells) + "</tr>"
