"""Link in virtual time, on the clock of the model's thread, for the simulator. It moves nothing."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.links.base import Link
from expertcast.runtime.storage.layout import FULL
from expertcast.runtime.storage.transfer import Transfer


class VirtualLink(Link):
    """Simulates a link: copies take their computed time, and nothing is moved.

    Args:
        block_bytes: bytes of one expert by precision, including the full one.
        bandwidth: bytes per second.
        latency: seconds per copy.
        window: prefetches in flight; these can no longer be overtaken or cancelled.
        expand_s: seconds of the model's thread per expansion of a packed copy.

    Raises:
        ExpertcastError: the bandwidth is not positive and finite, or the latency is negative.
    """

    name = "virtual"

    def __init__(
        self, block_bytes: Mapping[str, int], bandwidth: float, latency: float = 0.0, *, window: int = 1,
        expand_s: float = 0.0,
    ) -> None:  # fmt: skip
        if not 0 < bandwidth < math.inf:
            raise ExpertcastError(f"bandwidth={bandwidth:g} is out of range: use a finite value above 0, such as 4e9")
        if not latency >= 0:
            raise ExpertcastError(f"latency={latency:g} is out of range: use 0 or more seconds")
        super().__init__()
        self.now = 0.0
        self.latency = latency
        self._block_bytes = block_bytes
        self._seconds = {name: latency + count / bandwidth for name, count in block_bytes.items()}
        self.window, self._expand_s = window, expand_s
        self._free_at = 0.0
        """Time at which the last issued copy arrives."""
        self._issued: deque[tuple[float, float, Transfer]] = deque()
        """Copies in flight, each with its final arrival time and its seconds on the link."""

    @property
    def copy_s(self) -> float:
        return self._seconds[FULL]

    def block_bytes(self, precision: str) -> int:
        return self._block_bytes[precision]

    def copy_bytes(self, key: int, precision: str) -> int:
        return self._block_bytes[precision]

    def clock(self) -> float:
        return self.now

    def _may_start(self, copy: Transfer) -> bool:
        return copy.urgent or len(self._issued) < self.window

    def start(self, copy: Transfer) -> None:
        self._issue(copy, self.now)

    def wait(self, copy: Transfer) -> None:
        """Advance the time until the copy has arrived."""
        while not copy.done:
            self.run_until(self._issued[0][0])

    def expand(self, copy: Transfer) -> None:
        """Advance the time by one expansion."""
        self.spend(self._expand_s)

    def restart(self) -> None:
        self._issued.clear()
        self._queue.clear()
        self._free_at = self.now

    def run_until(self, time: float) -> None:
        """Advance the model's thread to `time`; copies proceed meanwhile."""
        self.now = time
        issued = self._issued
        while issued and issued[0][0] <= time:
            at, seconds, copy = issued.popleft()
            copy.finish(at)
            self.copies += 1
            self.busy_s += seconds
            self.bytes_moved += self._block_bytes[copy.precision]
            if len(issued) < self.window and (waiting := self._queue.first()) is not None:
                waiting.begin()
                self._issue(waiting, at)

    def spend(self, seconds: float) -> None:
        """Advance the model's thread by `seconds`; copies proceed meanwhile."""
        self.run_until(self.now + seconds)

    def _issue(self, copy: Transfer, time: float) -> None:
        """Put the copy after all issued ones, at `time` at the earliest."""
        seconds = self._seconds[copy.precision]
        self._free_at = max(self._free_at, time) + seconds
        self._issued.append((self._free_at, seconds, copy))
