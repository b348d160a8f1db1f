"""Links whose copies start and arrive when a test calls for it."""

from __future__ import annotations

from collections import deque

from expertcast.runtime.links.base import Link
from expertcast.runtime.links.emulated import move
from expertcast.runtime.storage.transfer import Transfer


class ManualLink(Link):
    name = "manual"

    def __init__(self) -> None:
        super().__init__()
        self.submitted: list[tuple[int, str]] = []
        self.queue: list[Transfer] = []

    def submit(self, key: int, slot: int, *, urgent: bool, precision: str = "full") -> Transfer:
        self.submitted.append((key, "urgent" if urgent else "forecast"))
        copy = super().submit(key, slot, urgent=urgent, precision=precision)
        self.queue.append(copy)
        return copy

    def _may_start(self, copy: Transfer) -> bool:
        return False

    def start(self, copy: Transfer) -> None:
        copy.begin()

    def arrive(self, count: int | None = None) -> None:
        """Complete the first `count` copies of the queue, or all."""
        for copy in self.queue[:count]:
            copy.begin()
            self._copy(copy)
            self._complete(copy, 0.0, 0.0)
        del self.queue[:count]

    def wait(self, copy: Transfer) -> None:
        if not copy.done:
            self.queue.remove(copy)
            self.queue.insert(0, copy)
            self.arrive(1)
        super().wait(copy)

    def cancel(self, copy: Transfer) -> bool:
        cancelled = super().cancel(copy)
        if cancelled:
            self.queue.remove(copy)
        return cancelled

    def restart(self) -> None:
        super().restart()
        self.queue.clear()


class SteppedLink(Link):
    """One copy at a time, half a block per step, urgent ones first.

    Steps are taken when a test calls :meth:`step`, and at every call of the link as many as `pace` says next: so what
    another link's thread does between any two calls can be played, and played again.
    """

    name = "stepped"

    def __init__(self) -> None:
        super().__init__()
        self.pace: deque[int] = deque()
        self.failing = 0
        """Let the next `count` copies fail with half of their bytes written."""
        self.refusing = 0
        """Refuse the next `count` copies."""
        self._in_flight: Transfer | None = None

    def step(self, count: int = 1) -> None:
        """Run steps of half a copy each."""
        for _ in range(count):
            if self._in_flight is not None:
                copy, self._in_flight = self._in_flight, None
                self._finish(copy)
            elif (following := self._queue.first()) is not None:
                self._run(following)

    def submit(self, key: int, slot: int, *, urgent: bool, precision: str = "full") -> Transfer:
        self._go_on()
        if self.refusing:
            self.refusing -= 1
            raise OSError("the link is down")
        copy = super().submit(key, slot, urgent=urgent, precision=precision)
        self._go_on()
        return copy

    def _may_start(self, copy: Transfer) -> bool:
        return False

    def start(self, copy: Transfer) -> None:
        self._in_flight = copy
        self._pool.block(copy.slot).fill_(0xFF)  # the slot's previous content must not pass for the new one
        move(self._source(copy), self._pool.block(copy.slot), 0, self.block_bytes(copy.precision) // 2)

    def _finish(self, copy: Transfer) -> None:
        if self.failing:
            self.failing -= 1
            copy.error = OSError("the copy was lost")
        else:
            move(self._source(copy), self._pool.block(copy.slot), self.block_bytes(copy.precision) // 2)
        self._complete(copy, 0.0, 0.0)

    def wait(self, copy: Transfer) -> None:
        assert not copy.cancelled
        while not copy.done:
            self.step()
        self._go_on()
        if copy.error is not None:
            raise copy.error

    def promote(self, copy: Transfer) -> None:
        self._go_on()
        super().promote(copy)

    def cancel(self, copy: Transfer) -> bool:
        self._go_on()
        return super().cancel(copy)

    def poll(self, copy: Transfer) -> bool:
        self._go_on()
        return copy.done

    def progress(self) -> None:
        self._go_on()

    def mark_read(self, slots: list[int]) -> None:
        self._go_on()

    def close(self) -> None:
        super().close()
        if self._in_flight is not None:
            self.step()

    def _go_on(self) -> None:
        if self.pace:
            self.step(self.pace.popleft())
