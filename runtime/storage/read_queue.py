"""What is to be read next: urgent reads first, then forecasts, each in the order in which they were asked for."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

from expertcast.runtime.storage.arrival import Arrival

R = TypeVar("R", bound=Arrival)


class ReadQueue(Generic[R]):
    """Reads by rank and order. Whoever uses it holds a lock.

    Args:
        waiting: whether something of a read is left to be taken; one of which nothing is leaves the queue.
    """

    def __init__(self, waiting: Callable[[R], bool]) -> None:
        self._waiting = waiting
        self._heap: list[tuple[int, int, R]] = []
        self._order = 0

    def push(self, read: R) -> None:
        """Behind those that are as urgent. One that is in the queue and has become urgent is pushed again."""
        self._order += 1
        heapq.heappush(self._heap, (read.rank, self._order, read))

    def first(self) -> R | None:
        """The next one, which stays in the queue as long as something of it is left; None: there is none."""
        while self._heap:
            rank, _, read = self._heap[0]
            if rank == read.rank and not read.cancelled and self._waiting(read):
                return read
            heapq.heappop(self._heap)  # of another rank: it was pushed again
        return None

    def clear(self) -> None:
        """Forget all."""
        self._heap.clear()
