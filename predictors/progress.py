"""How far a long stage is, on standard error: the one bar of the package, for every stage that may take seconds.

`TQDM_DISABLE=1` leaves it out, as it does for every bar of tqdm.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

from tqdm import tqdm

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
