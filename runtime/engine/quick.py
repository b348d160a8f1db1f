"""Two-stage forecasts: what a quick forecast is sure of goes out at once, the rest after early attention.

The quick forecast is the target's router on the stand-in itself. How sure it is of each rank is learnt while it runs:
by how often the expert at that rank was then needed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

SURE = 0.97
"""Share of a rank's experts that must have been needed."""
FIRST_SEEN = 32
"""Forecasts before a rank is trusted."""
_MEMORY = 512
"""Forecasts that count."""
BROUGHT = 0.25
"""Share of forecasts that must have asked for something that was missing: one takes a third as long as early attention,
which asks for the same a little later."""
_NEWEST = 0.1
"""Weight of the newest forecast in that share."""
LOOK = 8
"""Where forecasts are not worth making, one in so many is made all the same, to see whether that has changed."""


class QuickForecasts:
    """Which experts of a quick forecast are asked for, for a model of `layers` MoE layers."""

    def __init__(self, layers: int) -> None:
        self.made: dict[int, list[list[int]]] = {}
        """By layer, the rows of ids of forecasts whose layers have not run yet."""
        self._right: list[list[float]] = [[] for _ in range(layers)]
        self._seen: list[float] = [0.0] * layers
        self._brought: list[float] = [1.0] * layers
        self._left_out: list[int] = [0] * layers

    def start(self) -> None:
        """A forward starts."""
        self.made.clear()

    def worth(self, layer: int) -> bool:
        """Whether to make the quick forecast that is due for a layer: something may be asked for by it, or learnt."""
        if self._seen[layer] < FIRST_SEEN or (self._brought[layer] >= BROUGHT and self._trusted(layer)):
            return True
        self._left_out[layer] = (self._left_out[layer] + 1) % LOOK
        return self._left_out[layer] == 0

    def asked(self, layer: int, missing: bool) -> None:
        """Experts of a layer were asked for; `missing`: one of them at least was not there."""
        self._brought[layer] += _NEWEST * (missing - self._brought[layer])

    def sure(self, layer: int, ids: Sequence[Sequence[int]]) -> list[int]:
        """Experts of a layer to ask for: distinct, from a forecast of T tokens with K `ids` each, surest first."""
        rows = [list(row) for row in ids]
        self.made[layer] = rows
        if self._seen[layer] < FIRST_SEEN:
            return []
        return list(dict.fromkeys(row[rank] for rank in self._trusted(layer) for row in rows))

    def _trusted(self, layer: int) -> list[int]:
        least = SURE * self._seen[layer]
        return [rank for rank, count in enumerate(self._right[layer]) if count >= least]

    def learn(self, layer: int, needed: Collection[int]) -> None:
        """The experts that the layer executes are known."""
        rows = self.made.pop(layer, None)
        if rows is None:
            return
        right = self._right[layer] = self._right[layer] or [0.0] * len(rows[0])
        fade = 1.0 if self._seen[layer] < _MEMORY else 1.0 - len(rows) / _MEMORY
        self._seen[layer] = self._seen[layer] * fade + len(rows)
        for rank in range(len(right)):
            right[rank] = right[rank] * fade + sum(row[rank] in needed for row in rows)
