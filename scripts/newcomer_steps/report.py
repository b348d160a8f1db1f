"""The table of a run, in Markdown: every word of it comes from the result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from marked_page import replace_between

from expertcast.predictors.messages import Json

BEGIN, END = "<!-- tools -->", "<!-- end of tools -->"


def write(result: Json, page: Path) -> None:
    """Replace what stands between the page's marks.

    Raises:
        ExpertcastError: no such page, or no marks in it.
    """
    replace_between(page, BEGIN, END, ecosystem(result), "the table is")


def ecosystem(result: Json) -> str:
    """What a README says: the tools, and with which versions they were tried."""
    lines = _table(
        ("tool", "takes", "same as resident", "note"),
        [(row["name"], row["takes"], _yes(row["identical"]), row["note"]) for row in result["tools"] if row["works"]],
    )
    ran = [row["works"] for row in result["commands"] if row["works"] is not None]
    page = [f"{sum(ran)} of {len(ran)} commands of this page ran from the wheel"] if ran else []
    versions = [f"{name} {version}" for name, version in result["versions"].items()]
    return "\n".join([*lines, "", f"{'; '.join([*page, ', '.join(versions)])} ({result['date']})."])


def everything(result: Json) -> str:
    """All rows, what failed and what was not tried too."""
    rows = [*result["tools"], *result["commands"]]
    return "\n".join(
        _table(
            ("tool", "works", "identical to resident", "seconds", "note"),
            [(row["name"], _works(row), _yes(row["identical"]), f"{row['seconds']:.0f}", row["note"]) for row in rows],
        )
    )


def _works(row: Json) -> str:
    if row["works"] is None:
        return "not tried"
    return ("yes" + (f", on {row['takes']}" if row["takes"] else "")) if row["works"] else "**no**"


def _yes(value: bool | None) -> str:
    return "" if value is None else "yes" if value else "**no**"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *escaped)]
