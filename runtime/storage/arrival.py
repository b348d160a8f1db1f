"""Bytes on their way from a disk into memory, and what brings them."""

from __future__ import annotations

import _thread
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

_URGENT, _FORECAST = 0, 1


@dataclass(slots=True, eq=False)
class Arrival:
    """One thing that was asked of a :class:`Reader`."""

    target: Tensor
    """uint8, contiguous, in host memory: what is filled."""
    arrival: Callable[[Any], None] | None = None
    """Called with this by the thread that filled the last of it, before anybody who waits goes on."""
    urgent: bool = False
    cancelled: bool = False
    begun: int = 0
    """Parts of the work that a thread has taken."""
    error: BaseException | None = None
    start: float = 0.0
    end: float = 0.0
    """Seconds of the clock in which it was under way."""
    _arrived: _thread.LockType = field(default_factory=_thread.allocate_lock, repr=False)
    """Held until all of it has come."""

    @property
    def rank(self) -> int:
        """What is lower comes first."""
        return _URGENT if self.urgent else _FORECAST

    @property
    def bytes_read(self) -> int:
        """Bytes of the file that are read for it."""
        return self.target.numel()

    def expect(self) -> None:
        """It has been asked for: whoever waits does so until `arrive`."""
        self._arrived.acquire()

    def arrive(self, end: float) -> None:
        """All of it has come, or failed with `error`; `end` in seconds of the clock."""
        self.end = end
        try:
            if self.arrival is not None:
                self.arrival(self)
        except BaseException as error:  # raised by whoever waits
            self.error = self.error or error
        finally:
            self._arrived.release()

    def wait(self) -> None:
        """Return when all of it has come.

        Raises:
            ExpertcastError: it could not be read.
            BaseException: whatever `arrival` raised.
        """
        with self._arrived:
            pass
        if self.error is not None:
            raise self.error


class Reader(Protocol):
    """Threads that fill what is asked for, urgent ones first."""

    def submit(self, read: Any) -> None:
        """Queue one, behind those that are as urgent."""

    def promote(self, read: Any) -> None:
        """What has not been begun of it comes before all forecasts."""

    def cancel(self, read: Any) -> bool:
        """Drop one that no thread has begun. True if nothing of it was or will be read."""

    def close(self) -> None:
        """Drop what is queued, and return when nothing is being read."""
