"""The error for users, text tables, and progress bars.

Bars show on standard error how far a long stage is; `TQDM_DISABLE=1` leaves them out.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any, TypeAlias, TypeVar

from tqdm import tqdm

# Errors

_MISMATCHED = "ignore_mismatched_sizes"
"""In what transformers says, after it has logged a report."""


class ExpertcastError(ValueError):
    """Bad input: the message is one line that names what is wrong and the remedy.

    The command line prints the line and exits with status 2. Every other exception is a bug.
    """


def first_line(error: Exception) -> str:
    """What an error says, in one line; its kind where it says nothing."""
    text = str(error).strip()
    if isinstance(error, json.JSONDecodeError):
        return f"a file of it is damaged, which is no JSON ({text.splitlines()[0]}): fetch it again"
    if _MISMATCHED in text:
        return "its configuration and its weights disagree about their sizes: one of them is damaged, fetch it again"
    return text.splitlines()[0] if text else type(error).__name__


# Results and tables

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


DELAY_S = 5.0
"""A stage that ends sooner shows nothing."""
LOG_S = 60.0
"""Seconds from one line to the next where standard error is no terminal but a log."""
B = TypeVar("B", bound=Sized)


class Progress(tqdm):  # type: ignore[misc]
    """A bar that appears after some seconds; whatever it showed last stays, be it that it ends between two updates.

    Args:
        what: the stage.
        total: how many units it has; None: as many as `steps`, if these know it.
        unit: what is counted.
        steps: what iterating the bar gives, a unit each; None where it is told of units by `update`.
        initial: units that were done before.
        shown: False leaves it out. Under torchrun the first rank's is shown.
    """

    def __init__(
        self, what: str, *, unit: str, total: int | None = None, steps: Iterable[object] | None = None,
        initial: int = 0, shown: bool = True,
    ) -> None:  # fmt: skip
        hidden = {} if shown and os.environ.get("RANK", "0") == "0" else {"disable": True}
        super().__init__(
            steps, desc=what, total=total, unit=unit, initial=initial, unit_scale=unit == "token", delay=DELAY_S,
            mininterval=0.5 if sys.stderr.isatty() else LOG_S, dynamic_ncols=True, **hidden,
        )  # fmt: skip

    def close(self) -> None:
        """Show the end of a stage that took long enough, whenever its last update was."""
        if not self.disable and time.time() - self.start_t >= self.delay:
            self.last_print_t = time.time()  # what tqdm takes for a bar that was never shown, it would not end
        super().close()


def end_bars() -> None:
    """Close the bars that an error left open, so that what is said of it has a line of its own."""
    for bar in list(getattr(Progress, "_instances", ())):
        if isinstance(bar, Progress):
            bar.close()


def tokens_read(batches: Iterable[B], what: str, total: int | None, *, shown: bool = True) -> Iterator[B]:
    """The same batches one after another, their tokens counted when the next one is asked for.

    Args:
        batches: of tokens, as long as their tokens are many.
        what, total, shown: as for :class:`Progress`.
    """
    with Progress(what, total=total, unit="token", shown=shown) as bar:
        for batch in batches:
            yield batch
            bar.update(len(batch))
