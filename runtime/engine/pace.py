"""How long until a layer asks for its experts, and how often experts are used: what a prefetch's value depends on."""

from __future__ import annotations

import numpy as np

from expertcast.runtime.engine.residency import Residency
from expertcast.runtime.policies.prefetch import Transfer
from expertcast.runtime.recording.observer import Observer

_MEMORY = 0.1
"""Weight of the newest observation in running means."""


class Pace(Observer):
    """Running means over decode steps, per layer. Waiting for copies is left out: it is what prefetching changes.

    Args:
        residency: tells it what is loaded and waited for.
        layers: MoE layers of the model.
    """

    def __init__(self, residency: Residency, layers: int) -> None:
        self._link, self._residency = residency.link, residency
        self._experts = experts = residency.experts
        self._block_bytes = residency.pool.layout.block_bytes
        self._busy_until_s = 0.0
        """When the link will have done what it has been given, by what copies take on average."""
        self._interval_s: list[float | None] = [None] * layers
        """From the moment the layer before was reached to the moment this one is."""
        self._rate_LE = np.zeros((layers, experts))
        """Share of recent steps that used the expert."""
        self._fresh = True
        self._layer = -1
        self._reached_s = 0.0
        self._waited_s = 0.0
        """Since then."""
        residency.tell(self)

    def loading(self, layer: int, nbytes: int, urgent: bool) -> None:
        self._busy_until_s = max(self._busy_until_s, self._link.clock()) + self._seconds(nbytes)

    def dropped(self, layer: int, nbytes: int, forecast: bool) -> None:
        self._busy_until_s -= self._seconds(nbytes)

    def waited(self, layer: int, seconds: float, in_time: int) -> None:
        self._waited_s += seconds

    def start_pass(self, fresh: bool) -> None:
        """A forward starts; `fresh`: with new texts."""
        self._fresh, self._layer = fresh, -1

    def reached(self, layer: int, experts: list[int]) -> None:
        """The layer's experts are known and about to be requested."""
        now, before = self._link.clock(), self._layer
        if before == layer - 1 >= 0 and not self._fresh:
            interval, known = now - self._reached_s - self._waited_s, self._interval_s[layer]
            self._interval_s[layer] = interval if known is None else known + _MEMORY * (interval - known)
        self._layer, self._reached_s, self._waited_s = layer, now, 0.0
        self._rate_LE[layer] *= 1 - _MEMORY
        self._rate_LE[layer, experts] += _MEMORY

    def transfer(self, target: int) -> Transfer:
        """What a selection for a later layer may count with."""
        residency, first, now = self._residency, target * self._experts, self._link.clock()
        copy_s = self._link.copy_s
        intervals = self._interval_s[self._layer + 1 : target + 1]
        left_s = copy_s if None in intervals else sum(value for value in intervals if value is not None)
        backlog_s = min(len(residency.copies) * copy_s, max(0.0, self._busy_until_s - now))
        # the layer at work waits for its copies too, and so does what follows
        awaited_s = 0.0 if residency.running.isdisjoint(residency.copies) else backlog_s
        return Transfer(
            copy_s=copy_s,
            backlog_s=backlog_s,
            left_s=max(0.0, left_s - (now - self._reached_s)) + awaited_s,
            free=residency.free(target),
            resident=lambda expert: residency.holds(first + expert),
            victim_worth=lambda: self._worth(residency.victim(target)),
            seconds_of=None if self._link.pools is None else lambda expert: self._link.seconds(first + expert),
        )

    def _seconds(self, nbytes: int) -> float:
        return self._link.copy_s * nbytes / self._block_bytes

    def _worth(self, victim: int | None) -> float:
        if victim is None:
            return 0.0
        layer, expert = divmod(victim, self._experts)
        known = self._residency.eviction.by_layer[layer].worth(victim)
        return float(self._rate_LE[layer, expert]) if known is None else known
