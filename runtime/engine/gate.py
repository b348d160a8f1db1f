"""Which forecasts by a layer are worth making: those that may save more waiting than they cost.

A forecast takes the model's thread a set time, whatever it finds. Where most of a layer's experts are in their slots
already there is little that it could find.
"""

from __future__ import annotations

from collections.abc import Sequence

from expertcast.runtime.engine.residency import Residency
from expertcast.runtime.engine.tokens_ahead import TokensAhead
from expertcast.runtime.recording.observer import Observer

MEMORY = 0.1
"""Weight of the newest observation in running means."""
FOUND = 0.6
"""Share of what is missing that a forecast is expected to find in time."""
FORGET = 0.99
"""What a forecast is taken to cost shrinks by this with every one that is not made: a price that was measured at a bad
moment does not stand for ever."""


class ForecastGate(Observer):
    """Weighs waiting that a forecast may save against what forecasts have cost so far.

    What a layer will miss comes from a forecast of the whole token where there is one; else it is the mean number of
    its experts in recent steps that had no slot before a forecast, or at all.

    Args:
        residency: tells it what was missing.
        layers: MoE layers of the model.
        tokens_ahead: says how many of a layer's experts will be missing, where something forecasts whole tokens.
    """

    def __init__(self, residency: Residency, layers: int, tokens_ahead: TokensAhead | None) -> None:
        self._link, self._tokens_ahead = residency.link, tokens_ahead
        self._missing: list[float | None] = [None] * layers
        self._cost_s: float | None = None
        residency.tell(self)

    def requested(self, layer: int, keys: Sequence[int], missing: Sequence[int], again: int, forecast: int) -> None:
        count, known = float(len(missing) + forecast), self._missing[layer]
        self._missing[layer] = count if known is None else known + MEMORY * (count - known)

    def pays(self, layer: int) -> bool:
        """Whether a forecast for `layer` is expected to save more waiting than it costs."""
        if self._cost_s is None:
            return True
        missing = None if self._tokens_ahead is None else self._tokens_ahead.missing(layer)
        if missing is None:
            missing = self._missing[layer]
        if missing is None or missing * FOUND * self._link.copy_s > self._cost_s:
            return True
        self._cost_s *= FORGET
        return False

    def took(self, seconds: float) -> None:
        """A forecast, with all that was asked for by it, took the model's thread so long."""
        cost_s = self._cost_s
        self._cost_s = seconds if cost_s is None else cost_s + MEMORY * (seconds - cost_s)
