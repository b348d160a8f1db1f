"""Links whose copies start and arrive when a test says so."""

from __future__ import annotations

from collections import deque

from expertcast.runtime.links.base import Copy, Link
from expertcast.runtime.links.emulated import move
from expertcast.runtime.storage.layout import FULL


class ManualLink(Link):
    name = "manual"

    def __init__(self) -> None:
        super().__init__()
        self.submitted: list[tuple[int, str]] = []
        self.queue: list[Copy] = []

    def submit(self, key: int, slot: int, *, urgent: bool, precision: str = FULL) -> Copy:
        self.submitted.append((key, "urgent" if urgent else "forecast"))
        copy = Copy(key, slot, urgent, precision=precision)
        self.queue.append(copy)
        return copy

    def start(self, copy: Copy) -> None:
        copy.started = True

    def arrive(self, count: int | None = None) -> None:
        """The first `count` copies of the queue (all) arrive."""
        for copy in self.queue[:count]:
            copy.started = True
            move(self._store, self._pool, copy, 0)
            self._count(copy, 0.0, 0.0)
            copy.done = True
        del self.queue[:count]

    def wait(self, copy: Copy) -> None:
        if not copy.done:
            self.queue.remove(copy)
            self.queue.insert(0, copy)
            self.arrive(1)
        if copy.error is not None:
            raise copy.error

    def cancel(self, copy: Copy) -> bool:
        if copy.started:
            return False
        copy.cancelled = True
        self.queue.remove(copy)
        return True


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
        """So many copies fail from now on, half of their bytes written."""
        self.refusing = 0
        """So many copies are refused from now on."""
        self._queue: list[Copy] = []
        self._under_way: Copy | None = None

    def step(self, count: int = 1) -> None:
        """Half a copy each."""
        for _ in range(count):
            if self._under_way is not None:
                self._finish(self._under_way)
                self._under_way = None
            elif self._queue:
                self._under_way = min(self._queue, key=lambda copy: not copy.urgent)
                self._begin(self._under_way)

    def submit(self, key: int, slot: int, *, urgent: bool, precision: str = FULL) -> Copy:
        self._go_on()
        if self.refusing:
            self.refusing -= 1
            raise OSError("the link is down")
        copy = Copy(key, slot, urgent, precision=precision)
        self._queue.append(copy)
        self._go_on()
        return copy

    def wait(self, copy: Copy) -> None:
        assert not copy.cancelled
        while not copy.done:
            self.step()
        self._go_on()
        if copy.error is not None:
            raise copy.error

    def promote(self, copy: Copy) -> None:
        self._go_on()
        super().promote(copy)

    def cancel(self, copy: Copy) -> bool:
        self._go_on()
        if copy.started:
            return False
        copy.cancelled = True
        self._queue.remove(copy)
        return True

    def poll(self, copy: Copy) -> bool:
        self._go_on()
        return copy.done

    def progress(self) -> None:
        self._go_on()

    def mark_read(self, slots: list[int]) -> None:
        self._go_on()

    def close(self) -> None:
        self._queue.clear()
        if self._under_way is not None:
            self.step()

    def _go_on(self) -> None:
        if self.pace:
            self.step(self.pace.popleft())

    def _begin(self, copy: Copy) -> None:
        self._queue.remove(copy)
        copy.started = True
        self._pool.block(copy.slot).fill_(0xFF)  # nobody may take the slot's last content for the new one
        move(self._store, self._pool, copy, 0, self.block_bytes(copy.precision) // 2)

    def _finish(self, copy: Copy) -> None:
        if self.failing:
            self.failing -= 1
            copy.error = OSError("the copy was lost")
        else:
            move(self._store, self._pool, copy, self.block_bytes(copy.precision) // 2)
        self._count(copy, 0.0, 0.0)
        copy.done = True
