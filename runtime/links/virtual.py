"""A link and the clock of the model's thread: one copy after another, misses before forecasts."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.links.base import Copy
from expertcast.runtime.links.queued import QueuedLink
from expertcast.runtime.storage.precision import FULL


@dataclass(slots=True, eq=False)
class VirtualCopy(Copy):
    """A copy that has been issued arrives at a time which nothing changes any more."""

    seconds: float = 0.0
    arrives: float = math.inf


class VirtualLink(QueuedLink):
    """Copies take as long as they are said to; nothing is moved.

    Args:
        copy_s: seconds of one expert's copy in full precision.
        lower: bytes and seconds of one expert's copy in each lower precision that there is.
        window: copies of forecasts that have been issued and can no longer be overtaken or cancelled.
        blocking: copies are made in the model's own thread (the instant link).
        expand_s: seconds that unpacking a copy in lower precision takes of the model's thread.
        write_back_s: seconds of the link that an evicted expert takes, before whatever is copied after it.
    """

    name = "virtual"

    def __init__(
        self, copy_s: float, *, lower: Mapping[str, tuple[int, float]] | None = None, window: int = 1,
        blocking: bool = False, expand_s: float = 0.0, write_back_s: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.now = 0.0
        self._lower = dict(lower or {})
        self._seconds = {FULL: copy_s, **{name: seconds for name, (_, seconds) in self._lower.items()}}
        self._window, self.overlaps, self._expand_s, self.write_back_s = window, not blocking, expand_s, write_back_s
        self._free_at = 0.0
        """When the last issued copy arrives."""
        self._issued: deque[VirtualCopy] = deque()

    @classmethod
    def of(
        cls, block_bytes: Mapping[str, int], bandwidth: float, latency: float = 0.0, *, expand_s: float = 0.0,
        write_back: float = 0.0, window: int = 1, blocking: bool = False,
    ) -> VirtualLink:  # fmt: skip
        """A link on which a copy takes latency + bytes / bandwidth.

        Args:
            block_bytes: of one expert, by precision; the full one is among them.
            bandwidth: bytes per second.
            latency: seconds per copy.
            write_back: share of an expert's copy that its eviction takes.
            expand_s, window, blocking: as for the class.

        Raises:
            ExpertcastError: no bandwidth, or a negative latency.
        """
        check_speed(bandwidth, latency)
        seconds = {name: latency + count / bandwidth for name, count in block_bytes.items()}
        lower = {name: (count, seconds[name]) for name, count in block_bytes.items() if name != FULL}
        return cls(
            seconds[FULL], lower=lower, window=window, blocking=blocking, expand_s=expand_s,
            write_back_s=write_back * seconds[FULL],
        )  # fmt: skip

    @property
    def copy_s(self) -> float:
        return self._seconds[FULL]

    def block_bytes(self, precision: str) -> int:
        """Bytes of one expert in a lower precision."""
        return self._lower[precision][0]

    def clock(self) -> float:
        return self.now

    def submit(self, key: int, slot: int, *, urgent: bool, precision: str = FULL) -> VirtualCopy:
        copy = VirtualCopy(key, slot, urgent, precision=precision, seconds=self._seconds[precision])
        if urgent or len(self._issued) < self._window:
            self._issue(copy)
        else:
            self._queued.append(copy)
        if not self.overlaps:
            self.wait(copy)
        return copy

    def wait(self, copy: Copy) -> None:
        """Let time pass until the copy has arrived."""
        assert isinstance(copy, VirtualCopy)
        while not copy.started:
            self.run_until(self._issued[0].arrives)
        if not copy.done:
            self.run_until(copy.arrives)

    def read_ahead(self, keys: Sequence[int]) -> None:
        """There is no store."""

    def expand(self, copy: Copy) -> None:
        """There is nothing to unpack, it only takes its time."""
        self.spend(self._expand_s)

    def write_back(self) -> None:
        """An evicted expert goes back over the link (row D2, trap 7)."""
        self._free_at = max(self._free_at, self.now) + self.write_back_s

    def restart(self) -> None:
        self._issued.clear()
        self._queued.clear()
        self._free_at = self.now

    def run_until(self, time: float) -> None:
        """The model's thread does something else until `time`; copies go on."""
        self.now = time
        issued = self._issued
        while issued and issued[0].arrives <= time:
            arrived = issued.popleft()
            arrived.done = True
            self._came(arrived)
            if self._queued and len(issued) < self._window:
                self._issue(self._queued.popleft(), arrived.arrives)

    def _came(self, copy: Copy) -> None:
        """A copy has arrived."""

    def spend(self, seconds: float) -> None:
        """The model's thread does something else for so long; copies go on."""
        self.run_until(self.now + seconds)

    def _issue(self, copy: Copy, time: float | None = None) -> None:
        """Behind everything that was issued before, at `time` (now) at the earliest."""
        assert isinstance(copy, VirtualCopy)
        if time is None:
            time = self.now
        copy.started = True
        start = self._free_at if self._free_at > time else time
        self._free_at = copy.arrives = start + copy.seconds
        self._issued.append(copy)
        self.copies += 1
        self.busy_s += copy.seconds


def check_speed(bandwidth: float, latency: float) -> None:
    """
    Raises:
        ExpertcastError: no bandwidth, or a negative latency.
    """
    if not 0 < bandwidth < math.inf:
        raise ExpertcastError(f"bandwidth={bandwidth:g}: give bytes per second above 0, such as 4e9")
    if not latency >= 0:
        raise ExpertcastError(f"latency={latency:g}: give seconds of 0 or more")
