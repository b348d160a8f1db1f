"""How long until a layer asks for its experts, and how often experts are used: what a prefetch's value depends on."""

from __future__ import annotations

import numpy as np

from expertcast.runtime.engine.residency import Residency
from expertcast.runtime.policies.prefetch import Transfer

_MEMORY = 0.1
"""Weight of the newest observation in running means."""


class Pace:
    """Running means over decode steps, per layer. Waiting for copies is left out: it is what prefetching changes."""

    def __init__(self, residency: Residency, layers: int, experts: int) -> None:
        self._residency = residency
        residency.follow_link()
        self._experts = experts
        self._interval_s: list[float | None] = [None] * layers
        """From the moment the layer before was reached to the moment this one is."""
        self._rate_LE = np.zeros((layers, experts))
        """Share of recent steps that used the expert."""
        self._fresh = True
        self._layer = -1
        self._reached_s = 0.0
        self._waited_s = 0.0

    def start_pass(self, fresh: bool) -> None:
        self._fresh, self._layer = fresh, -1

    def reached(self, layer: int, experts: list[int]) -> None:
        """The layer's experts are known and about to be requested."""
        now, before = self._residency.link.clock(), self._layer
        if before == layer - 1 >= 0 and not self._fresh:
            waited = self._residency.stats.layers[before].waited_s - self._waited_s
            interval, known = now - self._reached_s - max(waited, 0.0), self._interval_s[layer]
            self._interval_s[layer] = interval if known is None else known + _MEMORY * (interval - known)
        self._layer, self._reached_s = layer, now
        self._waited_s = self._residency.stats.layers[layer].waited_s
        self._rate_LE[layer] *= 1 - _MEMORY
        self._rate_LE[layer, experts] += _MEMORY

    def transfer(self, target: int) -> Transfer:
        """What a selection for a later layer may count with."""
        residency, first = self._residency, target * self._experts
        copy_s = residency.link.copy_s
        intervals = self._interval_s[self._layer + 1 : target + 1]
        left_s = copy_s if None in intervals else sum(value for value in intervals if value is not None)
        elapsed = residency.link.clock() - self._reached_s
        backlog_s = residency.backlog_s
        awaited_s = backlog_s if residency.awaits else 0.0  # the layer at work waits too, and so does what follows
        return Transfer(
            copy_s=copy_s,
            backlog_s=backlog_s,
            left_s=max(0.0, left_s - elapsed) + awaited_s,
            free=residency.free(target),
            resident=lambda expert: residency.holds(first + expert),
            victim_worth=lambda: self._worth(residency.victim(target)),
        )

    def _worth(self, victim: int | None) -> float:
        if victim is None:
            return 0.0
        layer, expert = divmod(victim, self._experts)
        known = self._residency.eviction.by_layer[layer].worth(victim)
        return float(self._rate_LE[layer, expert]) if known is None else known
