"""Eviction by a forecast of the routing of the next tokens.

L MoE layers, E routed experts per layer. The key of an expert is layer * E + expert. H rows of a forecast: the first is
the current token, the next ones are the tokens after it, and the last one is every token after those.

Source: SeqMoE (2026, arXiv 2609.12978) evicts by the expected next use. The discounted value and the loads on an idle
link are this project's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from expertcast.runtime.policies.base import CacheShape, PolicyConfig, number
from expertcast.runtime.policies.eviction import NextRun, Scores

Numbers = npt.NDArray[np.float64]

MIN_PROBABILITY = 1e-9
"""Lower bound of probabilities: no expert is certain to stay unused."""


@dataclass(frozen=True, kw_only=True)
class ForecastConfig(PolicyConfig):
    """Options of :class:`ForecastEviction`."""

    discount: float = number(0.8, "(0, 1)")
    """Value of a use one token later, relative to a use now."""
    memory: int = number(100, "[1, inf)")
    """Number of steps over which use is averaged where there is no forecast."""
    idle_loads: int = number(1, "[0, inf)")
    """Maximum number of experts of later tokens that each layer loads while the link is idle; 0: none. Larger values
    delay misses, which wait for copies in flight."""


class ForecastEviction(NextRun):
    """Evicts the expert with the lowest expected discount ** (tokens until its next use).

    `see_tokens` delivers the forecasts. Without a forecast, the probability of a use is the expert's share of recent
    steps of its layer: before the first forecast, after new sequences start, and without a predictor. A new forecast
    re-ranks all layers.
    """

    name = "forecast"
    config_class = ForecastConfig
    reads_tokens = True
    config: ForecastConfig

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._share_LE: Numbers = np.full((shape.layers, shape.experts), shape.top_k / shape.experts)
        """Share of recent steps of the layer that used an expert."""
        self._steps = [0] * shape.layers
        self._probability_HLE: Numbers | None = None
        self._log_value_HLE: Numbers | None = None
        """Log of the expected discount ** (tokens after row h until the next use), given no use before row h."""
        self._first_pass = 0
        """Pass of the forecast's first row."""

    def start_pass(self, fresh: bool) -> None:
        super().start_pass(fresh)
        if fresh and self._log_value_HLE is not None:
            self._probability_HLE = self._log_value_HLE = None
            self._changed.update(range(self.shape.layers))

    def start_layer(self, layer: int, keys: Sequence[int]) -> None:
        super().start_layer(layer, keys)
        first, share_E = layer * self.shape.experts, self._share_LE[layer]
        self._steps[layer] += 1
        weight = 1 / min(self._steps[layer] + 1, self.config.memory)
        share_E *= 1 - weight
        share_E[[key - first for key in keys]] += weight

    def see_tokens(self, probability_HLE: Tensor) -> None:
        self._probability_HLE = probability_HLE.detach().cpu().double().numpy()
        self._log_value_HLE = np.log(next_use_value(self._probability_HLE, self.config.discount))
        self._first_pass = self._pass
        self._changed.update(range(self.shape.layers))

    def worth(self, key: int) -> float:
        layer, expert = divmod(key, self.shape.experts)
        if self._probability_HLE is None:
            return float(self._share_LE[layer, expert])
        return float(self._row(self._probability_HLE, layer)[expert])

    def wanted(self) -> list[tuple[int, float]]:
        """Return absent experts to load, of layers that this policy has seen run."""
        layers = [layer for layer, steps in enumerate(self._steps) if steps]
        if not layers or not self.config.idle_loads:
            return []
        experts = self.shape.experts
        cost_LE = np.stack([-self._log_values(layer) - self._lead(layer) for layer in layers])
        for cost_E, layer in zip(cost_LE, layers, strict=True):
            cost_E[self._ranking[layer]] = math.inf
        cost_N = cost_LE.ravel()
        count = min(self.config.idle_loads, int(np.isfinite(cost_N).sum()))
        least = np.argpartition(cost_N, max(0, count - 1))[:count]
        best = least[np.argsort(cost_N[least])].tolist()
        keys = [layers[index // experts] * experts + index % experts for index in best]
        return [(key, self.worth(key)) for key in keys]

    def _score(self, layer: int) -> Scores:
        return Scores(self._log_values(layer).tolist(), offset=self._lead(layer))

    def _lead(self, layer: int) -> float:
        """Return the log of the discount from the first pass to the layer's next run, comparable between layers."""
        return self._due(layer) * math.log(self.config.discount)

    def _log_values(self, layer: int) -> Numbers:
        """Return the log of the expected discounted next use [E], counted from the layer's next run."""
        if self._log_value_HLE is None:
            log_E: Numbers = np.log(endless_value(self._share_LE[layer], self.config.discount))
            return log_E
        return self._row(self._log_value_HLE, layer)

    def _row(self, table_HLE: Numbers, layer: int) -> Numbers:
        row_E: Numbers = table_HLE[min(self._next[layer] - self._first_pass, len(table_HLE) - 1), layer]
        return row_E


def next_use_value(probability_HLE: Numbers, discount: float) -> Numbers:
    """Return the expected discount ** (rows until the first use), counted from each row [H, L, E].

    V_h = p_h + (1 - p_h) discount V_{h+1}. The last row repeats without end.

    Args:
        probability_HLE: probability of a use per row, layer and expert.
        discount: value of a use one row later, between 0 and 1.
    """
    value_HLE = np.empty_like(probability_HLE)
    value_HLE[-1] = endless_value(probability_HLE[-1], discount)
    for row in range(len(value_HLE) - 2, -1, -1):
        probability_LE = np.maximum(probability_HLE[row], MIN_PROBABILITY)
        value_HLE[row] = probability_LE + (1 - probability_LE) * discount * value_HLE[row + 1]
    return value_HLE


def endless_value(probability: Numbers, discount: float) -> Numbers:
    """Return p / (1 - discount (1 - p)): the value of :func:`next_use_value` for a constant probability p."""
    probability = np.maximum(probability, MIN_PROBABILITY)
    value: Numbers = probability / (1 - discount * (1 - probability))
    return value
