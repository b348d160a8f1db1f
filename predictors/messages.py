"""The error class for users, text tables, and progress bars.

A progress bar appears on standard error when a stage takes more than five seconds. `TQDM_DISABLE=1` disables bars.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence, Sized
from importlib.metadata import requires
from threading import Timer
from typing import Any, TypeAlias, TypeVar

from tqdm import tqdm

# Errors

_MISMATCHED = "ignore_mismatched_sizes"
"""Part of a transformers error message that refers to a report in the log."""


class ExpertcastError(ValueError):
    """Invalid input: a message of one line that names the problem and the remedy.

    The command line prints the message and exits with status 2. Any other exception is a bug.

    Example:
        >>> import expertcast
        >>> expertcast.load_documents("missing.txt")
        Traceback (most recent call last):
        ...
        expertcast.predictors.messages.ExpertcastError: no file missing.txt: ...
    """


class TooLargeError(ExpertcastError):
    """A model exceeds the free memory of its device."""


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its class name if the message is empty."""
    text = str(error).strip()
    if isinstance(error, json.JSONDecodeError):
        return f"a file is not valid JSON ({text.splitlines()[0]}): download it again"
    if _MISMATCHED in text:
        return "the sizes in config.json and in the weights differ: one of the files is damaged, download it again"
    return text.splitlines()[0] if text else type(error).__name__


_EXTRAS = {
    "lightning": "train", "torchmetrics": "train", "tensorboard": "train", "datasets": "train", "matplotlib": "report",
}  # fmt: skip
"""Extra that brings a package, by its name."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra by the names of its packages, with or without a checkout."""
    end = f'; extra == "{extra}"'
    packages = [each.removesuffix(end) for each in requires("expertcast") or () if each.endswith(end)]
    return shlex.join(["pip", "install", *packages])


def missing_extra(error: ModuleNotFoundError) -> ExpertcastError:
    """Return the error that names the extra of a missing package.

    Raises:
        ModuleNotFoundError: `error` itself, if no extra brings the package.
    """
    package = (error.name or "").partition(".")[0]
    if package not in _EXTRAS:
        raise error
    return ExpertcastError(f"{package} is not installed: {install_command(_EXTRAS[package])}")


# Results and tables

Json: TypeAlias = dict[str, Any]
"""JSON object: values are numbers, strings, booleans, None, lists and objects."""


def aligned(rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Format rows of equal length as a text table with two spaces between columns.

    A table wider than the terminal (or `COLUMNS`) is split; each further part begins with the left-aligned columns.

    Args:
        rows: cells; the first row is the heading.
        left: number of leading columns that are left-aligned; the others are right-aligned.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    turns = [str.ljust if column < left else str.rjust for column in range(len(widths))]
    lines = [[turn(cell, width) for turn, cell, width in zip(turns, row, widths, strict=True)] for row in rows]
    most, parts, first = shutil.get_terminal_size((0, 0)).columns, [list[int]()], list(range(left))
    for column in range(len(widths)):
        taken = sum(widths[each] + 2 for each in parts[-1])
        if most and column > left and len(parts[-1]) > left and taken + widths[column] > most:
            parts.append(first.copy())
        parts[-1].append(column)
    return "\n\n".join(
        "\n".join("  ".join(line[column] for column in part).rstrip() for line in lines) for part in parts
    )


def format_bytes(count: float) -> str:
    """Format a number of bytes with its unit, such as 1.23 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


DELAY_S = 5.0
"""Seconds before a bar appears."""
LOG_S = 60.0
"""Seconds between two updates when standard error is not a terminal."""
B = TypeVar("B", bound=Sized)


class Progress(tqdm):  # type: ignore[misc]
    """Progress bar that appears after five seconds, also within a first step; its final state stays visible.

    Args:
        what: name of the stage.
        unit: name of the counted unit.
        total: number of units; by default the length of `steps`, if it has one.
        steps: iterable whose items count one unit each; without it, call `update`.
        initial: units completed earlier.
        shown: False disables the bar. Under torchrun only rank 0 shows it.
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
        self._first = Timer(DELAY_S, self.refresh)
        self._first.daemon = True
        if not self.disable and steps is None:
            self._first.start()

    def close(self) -> None:
        """Show the final state of a stage that took long enough, and close the bar."""
        if not hasattr(self, "start_t"):  # disabled, or an interrupt ended the constructor
            return
        if not self.disable and time.time() - self.start_t >= self.delay:
            self.last_print_t = time.time()  # else tqdm assumes that the bar never appeared and does not finish it
        if hasattr(self, "_first"):
            self._first.cancel()
        super().close()


def end_bars() -> None:
    """Close bars that an error left open, so that the error message starts on a new line."""
    for bar in list(getattr(Progress, "_instances", ())):
        if isinstance(bar, Progress):
            bar.close()


def with_token_progress(batches: Iterable[B], what: str, total: int | None, *, shown: bool = True) -> Iterator[B]:
    """Yield the batches and show a progress bar of their tokens.

    Args:
        batches: sized batches; the length is the number of tokens.
        what, total, shown: as for :class:`Progress`.
    """
    with Progress(what, total=total, unit="token", shown=shown) as bar:
        for batch in batches:
            yield batch
            bar.update(len(batch))
