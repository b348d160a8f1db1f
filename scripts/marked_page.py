"""Pages of which a part, between two marks, is written by scripts."""

from __future__ import annotations

from pathlib import Path

from expertcast.data.trace_writer import write_where_told
from expertcast.predictors import ExpertcastError


def replace_between(page: Path, begin: str, end: str, text: str, what: str) -> None:
    """Replace what stands between a page's marks.

    Args:
        page: to change.
        begin, end: the marks.
        text: what is to stand between them.
        what: that is, for the refusal, such as `tables are`.

    Raises:
        ExpertcastError: no such page, or no marks in it.
    """
    before, _, after = parts(page, begin, end, what)
    write_where_told(page, f"{before}{begin}\n\n{text}\n\n{end}{after}".encode())


def parts(page: Path, begin: str, end: str, what: str) -> tuple[str, str, str]:
    """What stands before, between and behind a page's marks: :func:`replace_between` will find them.

    Raises:
        ExpertcastError: no such page, or no marks in it.
    """
    before, first, rest = (page.read_text() if page.is_file() else "").partition(begin)
    between, last, after = rest.partition(end)
    if not (first and last):
        raise ExpertcastError(f"{page}: no line {begin} with a line {end} behind it: write them where {what} to be")
    return before, between, after
