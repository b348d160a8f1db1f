"""Experts that get slots before any text is read: known to be used much, for whatever reason.

E routed experts per layer. An expert's key is layer * E + expert.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from expertcast.runtime.engine.books import Books
from expertcast.runtime.links.kernel import KernelLink


class Filling(Books):
    """Fills free slots between two forwards."""

    def fill(self, keys: Sequence[int]) -> int:
        """Load experts into free slots, in this order, and wait for them: policies take the last one for the newest.

        Their bytes are counted, but neither as requests nor as forecasts.

        Args:
            keys: those that have a slot are passed over; those for which none is free are left out.

        Returns:
            How many were loaded.
        """
        self.link.follow()
        loaded = []
        for key in keys:
            if key not in self._slots and self.free(key // self.experts):
                self._load(key, True)
                loaded.append(key)
        for key, copy in list(self.copies.items()):
            self._arrive(key, copy, needed=key in loaded)
        self.link.check()
        return len(loaded)


def fill_tables(link: KernelLink, keys: Sequence[int], experts: int) -> int:
    """The same where tables on the device keep the books, which count these copies as forecasts'.

    Args:
        link: whose tables they are.
        keys: as for :meth:`Filling.fill`.
        experts: E.

    Returns:
        How many were loaded.
    """
    link.follow()
    tables, held = link.residency, set(held_by_tables(link))
    missing = [key for key in keys if key not in held][: tables.slots - len(held)]
    for key in missing:
        layer, expert = divmod(key, experts)
        ids_N = torch.tensor([expert], device=tables.slot_of.device)
        link.move(tables.expect(layer, ids_N, running=0), layer, urgent=False)
    link.join(link.ticket())
    link.synchronize()
    link.check()
    return len(missing)


def held_by_tables(link: KernelLink) -> list[int]:
    """Keys that have a slot by the device's tables, the least recently used first. Waits for the device."""
    tables = link.residency
    order = tables.used_at[: tables.slots].argsort()
    return [key for key in tables.key_of[: tables.slots][order].tolist() if key >= 0]
