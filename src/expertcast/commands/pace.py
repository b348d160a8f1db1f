"""Threads that help and work that fits: how `expertcast demo` keeps to its minutes on a slow or busy machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

LEAST = 0.1
"""Share of the work that is done however long it takes."""
_TRIAL_S = 0.2
_NEARLY = 0.9
"""One thread must be that much faster to be preferred: on a quiet machine the choice is the same each time."""


@contextmanager
def threads_that_help(work: Callable[[], object]) -> Iterator[int]:
    """As many threads as there were, or a single one where that does some work sooner: on a busy machine threads wait
    for each other. Gives how many; afterwards there are as many as before.

    Args:
        work: milliseconds of what will be done, repeated for a fifth of a second with each.
    """
    before = torch.get_num_threads()
    try:
        alone, together = (_rate(work, threads) for threads in (1, before))
        chosen = before if together >= _NEARLY * alone else 1
        torch.set_num_threads(chosen)
        yield chosen
    finally:
        torch.set_num_threads(before)


def _rate(work: Callable[[], object], threads: int) -> float:
    """Repetitions per second, after one that is not counted."""
    torch.set_num_threads(threads)
    work()
    start, done = time.perf_counter(), 0
    while (took := time.perf_counter() - start) < _TRIAL_S:
        work()
        done += 1
    return done / took


class Allowance:
    """Seconds for several stages, of which each is given what fits beside those after it.

    Args:
        seconds: for all of them.
        weights: of each stage in order, how many times as long as `work` it takes when nothing of it is left out.
        work: a short piece of it, timed before each stage: a machine may become busy.
    """

    def __init__(self, seconds: float, weights: Mapping[str, float], work: Callable[[], object]) -> None:
        self._end = time.monotonic() + seconds
        self._weights, self._work = dict(weights), work
        work()  # the first one warms up

    @property
    def left_s(self) -> float:
        """Seconds that are left; below 0 when they are over."""
        return self._end - time.monotonic()

    def share(self, stage: str) -> float:
        """The share of a stage's work that fits, :data:`LEAST` to 1; those before it are done."""
        order = list(self._weights)
        to_come = sum(self._weights[name] for name in order[order.index(stage) :])
        pace_s = min(_seconds(self._work) for _ in range(2))
        return min(1.0, max(LEAST, self.left_s / (pace_s * to_come)))


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def part(count: int, share: float) -> int:
    """A share of a count of things, at least one of them."""
    return max(1, round(count * share))
