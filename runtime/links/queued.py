"""A link that holds the copies of forecasts back until they are issued."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque

from expertcast.runtime.links.base import Copy, Link


class QueuedLink(Link):
    """Holds the copies of forecasts back until they are issued: misses overtake them, useless ones are dropped.

    A copy that has been issued is `started`, and comes after all that were issued before it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._queued: deque[Copy] = deque()

    @abstractmethod
    def _issue(self, copy: Copy) -> None:
        """Start the copy behind all that have been started."""

    def promote(self, copy: Copy) -> None:
        if not copy.started:
            copy.urgent = True
            self._queued.remove(copy)
            self._issue(copy)

    def cancel(self, copy: Copy) -> bool:
        if copy.started:
            return False
        copy.cancelled = True
        self._queued.remove(copy)
        return True
