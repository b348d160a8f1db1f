"""A link whose copies start and arrive when a test says so."""

from __future__ import annotations

from expertcast.runtime.links import Copy, HostMover, Link
from expertcast.runtime.slots import SlotPool
from expertcast.runtime.store import ExpertStore


class ManualLink(Link):
    name = "manual"

    def __init__(self) -> None:
        super().__init__()
        self.submitted: list[tuple[int, str]] = []
        self.queue: list[Copy] = []

    def attach(self, store: ExpertStore, pool: SlotPool) -> None:
        super().attach(store, pool)
        self._mover = HostMover(store, pool)

    def submit(self, key: int, slot: int, *, urgent: bool) -> Copy:
        self.submitted.append((key, "urgent" if urgent else "forecast"))
        copy = Copy(key, slot, urgent)
        self.queue.append(copy)
        return copy

    def start(self, copy: Copy) -> None:
        copy.started = True

    def arrive(self, count: int | None = None) -> None:
        """The first `count` copies of the queue (all) arrive."""
        for copy in self.queue[:count]:
            copy.started = True
            self._mover.move(copy.key, copy.slot)
            self._count(0.0)
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
