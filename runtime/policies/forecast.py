"""Evict by forecast: whose next use is farthest off, by a predictor of the coming tokens' routing.

L MoE layers, E routed experts per layer. An expert's key is layer * E + expert. H is rows of a forecast: this token,
the tokens after it one by one, and in the last row each token after those.

Source: SeqMoE (2609.12978) goes by the expected next use; its value, the discount and the loads on an idle link are
this project's.
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

LEAST = 1e-9
"""Probabilities below it count as this much: an expert is never certain not to come."""


@dataclass(frozen=True, kw_only=True)
class ForecastConfig(PolicyConfig):
    """What a later use is worth, and what is done with the time on an idle link."""

    discount: float = number(0.8, "(0, 1)")
    """What a use one token later is worth, against one now (0..1, neither included)."""
    memory: int = number(100, "[1, inf)")
    """Steps over which use is counted for where there is no forecast."""
    idle_loads: int = number(1, "[0, inf)")
    """Experts of coming tokens that one layer may load while the link is idle; 0: forecasts only evict. More delay
    misses, which wait for copies in flight."""


class ForecastEviction(NextRun):
    """Gives up the expert with the lowest expected value of its next use, discount ** (tokens until then).

    Forecasts come by `see_tokens`. Before the first, after the start of new texts, and without a predictor, each
    expert's share of its layer's recent steps stands in for the probability of every later use. All layers are ranked
    anew after a new forecast.
    """

    name = "forecast"
    config_class = ForecastConfig
    reads_tokens = True
    config: ForecastConfig

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._share_LE: Numbers = np.full((shape.layers, shape.experts), shape.top_k / shape.experts)
        """Share of a layer's recent steps in which an expert was used."""
        self._steps = [0] * shape.layers
        self._probability_HLE: Numbers | None = None
        self._log_value_HLE: Numbers | None = None
        """Log of the expected discount ** (tokens from row h's on), for an expert that is not used before that row."""
        self._made_in = 0
        """The pass whose token is the forecast's first row."""

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
        self._made_in = self._pass
        self._changed.update(range(self.shape.layers))

    def worth(self, key: int) -> float:
        layer, expert = divmod(key, self.shape.experts)
        if self._probability_HLE is None:
            return float(self._share_LE[layer, expert])
        return float(self._row(self._probability_HLE, layer)[expert])

    def wanted(self) -> list[tuple[int, float]]:
        """Only of layers that this policy rules over: those it has seen run."""
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
        """Log of the discount from the first pass of all to the layer's next run: comparable between layers."""
        return self._due(layer) * math.log(self.config.discount)

    def _log_values(self, layer: int) -> Numbers:
        """Log of each expert's expected discounted next use [E], from the layer's next run on."""
        if self._log_value_HLE is None:
            log_E: Numbers = np.log(endless_value(self._share_LE[layer], self.config.discount))
            return log_E
        return self._row(self._log_value_HLE, layer)

    def _row(self, table_HLE: Numbers, layer: int) -> Numbers:
        row_E: Numbers = table_HLE[min(self._next[layer] - self._made_in, len(table_HLE) - 1), layer]
        return row_E


def next_use_value(probability_HLE: Numbers, discount: float) -> Numbers:
    """Expected discount ** (rows until the first use), counted from each row on, [H, L, E].

    The last row goes on for ever. V_h = p_h + (1 - p_h) discount V_{h+1}.
    """
    value_HLE = np.empty_like(probability_HLE)
    value_HLE[-1] = endless_value(probability_HLE[-1], discount)
    for row in range(len(value_HLE) - 2, -1, -1):
        probability_LE = np.maximum(probability_HLE[row], LEAST)
        value_HLE[row] = probability_LE + (1 - probability_LE) * discount * value_HLE[row + 1]
    return value_HLE


def endless_value(probability: Numbers, discount: float) -> Numbers:
    """The same where each token uses the expert with one probability: p / (1 - discount (1 - p))."""
    probability = np.maximum(probability, LEAST)
    value: Numbers = probability / (1 - discount * (1 - probability))
    return value
