"""Running recall of the forecasts, and one warning when it falls below the recall that the checkpoint reports.

Recall is recall@k: the share of the K experts of a router's choice that the forecast for its layer names. Tokens are
summed in blocks, and blocks averaged with fading weights. The drift of a block is

    drift = mean over layers of (checkpoint's recall - block's recall)

The warning follows once the running mean over blocks is above `LEAST` and above `ERRORS` of its standard errors. These
are errors of block means: neighbouring tokens are alike, and errors of single tokens would be too small. The test runs
after every block: at four standard errors one test in 30,000 fails by chance without drift, and the least drift guards
against differences that are significant and small.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence

from expertcast.predictors.messages import Json

BLOCK = 32
"""Forwards that are summed before anything is computed."""
MEMORY = 32
"""Blocks over which the running means fade to 1/e."""
FIRST = 16
"""Blocks before the first warning."""
LEAST = 0.05
"""Largest drift without a warning."""
ERRORS = 4.0
"""Standard errors that the drift must be above 0."""
SAMPLED = 16
"""One forward in so many is compared where the router's choice is not on the host."""


class FadingMean:
    """A mean of values with fading weights; the first `memory` values have equal weights."""

    __slots__ = ("_memory", "_squares", "_weights", "count", "mean")

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0
        """Weighted mean of squares about the mean."""
        self._weights = 1.0
        """Sum of the squared weights: the inverse of the effective number of values."""

    def add(self, value: float) -> None:
        """Add a value."""
        self.count += 1
        share = max(1 / self.count, 1 / self._memory)
        off = value - self.mean
        self.mean += share * off
        self._squares = (1 - share) * (self._squares + share * off * off)
        self._weights = (1 - share) ** 2 * self._weights + share * share

    @property
    def error(self) -> float:
        """Standard error of the mean, as if the values were independent; infinite for fewer than two."""
        if self.count < 2:
            return math.inf
        return math.sqrt(self._squares / (1 - self._weights) * self._weights)


class DriftMonitor:
    """Follows the recall of the forecasts of one run.

    Args:
        layers: L.
        top_k: K.
        expected: the checkpoint's recall@k by target layer; None: it has no recall, and no drift is computed.
        name: of the predictor, for the warning.
    """

    def __init__(self, layers: int, top_k: int, expected: Mapping[int, float] | None, name: str = "") -> None:
        self.expected = None if expected is None else dict(expected)
        self.top_k = top_k
        self._name, self._layers = name, layers
        self._warned = False
        self.reset()

    def reset(self) -> None:
        """Forget all counts; a warning is not repeated."""
        self._hits, self._ids = [0] * self._layers, [0] * self._layers
        self._forwards = 0
        self._recall: list[FadingMean | None] = [None] * self._layers
        self._drift = FadingMean(MEMORY)
        self.tokens = 0
        """Compared tokens of the layer with most of them."""
        self.sampled = True
        """Whether this forward is compared where that costs a copy to the host."""

    def start(self) -> None:
        """Start a forward."""
        self._forwards += 1
        self.sampled = self._forwards % SAMPLED == 0
        if self._forwards % BLOCK == 0:
            self._close()

    def see(self, layer: int, forecast: Sequence[int], routed: Sequence[int]) -> None:
        """Compare a layer's forecast with its routing.

        Args:
            layer: MoE layer.
            forecast, routed: ids of the layer's forecast and of its router's choice, T rows of K, flat.
        """
        count, top_k = len(routed), self.top_k
        if count == top_k:
            self._hits[layer] += len(set(forecast).intersection(routed))
        elif count == len(forecast):
            self._hits[layer] += sum(
                len(set(forecast[row : row + top_k]).intersection(routed[row : row + top_k]))
                for row in range(0, count, top_k)
            )
        else:
            return
        self._ids[layer] += count

    def _close(self) -> None:
        """A block is full."""
        self.tokens += max(self._ids) // self.top_k
        fallen = []
        for layer, (hits, ids) in enumerate(zip(self._hits, self._ids, strict=True)):
            if not ids:
                continue
            recall = hits / ids
            running = self._recall[layer]
            if running is None:
                running = self._recall[layer] = FadingMean(MEMORY)
            running.add(recall)
            if self.expected is not None and layer in self.expected:
                fallen.append(self.expected[layer] - recall)
        self._hits, self._ids = [0] * self._layers, [0] * self._layers
        if fallen:
            self._drift.add(sum(fallen) / len(fallen))
            if not self._warned and self._fell():
                self._warned = True
                self._warn()

    def _fell(self) -> bool:
        drift = self._drift
        return drift.count >= FIRST and drift.mean > max(LEAST, ERRORS * drift.error)

    def _warn(self) -> None:
        warnings.warn(
            f"forecasts by {self._name} name {self._drift.mean:.3f} less of what the routers choose than their "
            f"checkpoint's metrics say (last {min(self.tokens, BLOCK * MEMORY)} tokens): train on such text",
            stacklevel=2,
        )

    @property
    def drift(self) -> float | None:
        """Mean over layers of the checkpoint's recall less the running one; None before there is any, or to compare."""
        return self._drift.mean if self._drift.count else None

    @property
    def recall(self) -> dict[int, float]:
        """The running recall by target layer, of those that were looked at."""
        return {layer: running.mean for layer, running in enumerate(self._recall) if running is not None}

    def as_dict(self) -> Json:
        """`drift`, and `forecast_recall`: what it comes from, by target layer."""
        recall = self.recall
        return {
            "drift": self.drift,
            "forecast_recall": {
                "mean": sum(recall.values()) / len(recall) if recall else None,
                "per_layer": recall,
                "checkpoint": self.expected,
                "tokens": self.tokens,
                "warned": self._warned,
            },
        }
