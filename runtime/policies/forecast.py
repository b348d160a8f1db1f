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

from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.policies.base import CacheShape, PolicyConfig
from expertcast.runtime.policies.eviction import Rescored, Scores

Numbers = npt.NDArray[np.float64]

LEAST = 1e-9
"""Probabilities below it count as this much: an expert is never certain not to come."""


@dataclass(frozen=True, kw_only=True)
class ForecastConfig(PolicyConfig):
    """What a later use is worth, and what is done with the time on an idle link."""

    discount: float = 0.8
    """What a use one token later is worth, against one now (0..1, neither included)."""
    memory: int = 100
    """Steps over which use is counted for where there is no forecast."""
    idle_loads: int = 1
    """Experts of coming tokens that one layer may load while the link is idle; 0: forecasts only evict. More delay
    misses, which wait for copies in flight."""

    def __post_init__(self) -> None:
        if not 0 < self.discount < 1:
            raise ExpertcastError(f"discount={self.discount}: give a number between 0 and 1, such as 0.8")
        if self.memory < 1:
            raise ExpertcastError(f"memory={self.memory}: give at least 1 step")
        if self.idle_loads < 0:
            raise ExpertcastError(f"idle_loads={self.idle_loads}: give 0 or more experts")


class ForecastEviction(Rescored):
    """Gives up the expert with the lowest expected value of its next use, discount ** (tokens until then).

    Forecasts come by `see_tokens`. Before the first, after the start of new texts, and without a predictor, each
    expert's share of its layer's recent steps stands in for the probability of every later use. As time passes all
    values grow alike, so a layer's experts are ranked anew when the layer has run, all of them after a new forecast.
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
        self._pass = -1
        self._made_in = 0
        """The pass whose token is the forecast's first row."""
        self._next = [0] * shape.layers
        """The pass in which each layer runs next."""

    def start_pass(self, fresh: bool) -> None:
        self._pass += 1
        if fresh and self._log_value_HLE is not None:
            self._probability_HLE = self._log_value_HLE = None
            self._changed.update(range(self.shape.layers))
        for layer, due in enumerate(self._next):
            if due < self._pass:  # the pass before was cut short, or this policy rules over other layers
                self._next[layer] = self._pass
                self._changed.add(layer)

    def start_layer(self, layer: int, keys: Sequence[int]) -> None:
        self._next[layer] = self._pass + 1
        self._changed.add(layer)
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
        tokens = self._next[layer] + layer / self.shape.layers
        return tokens * math.log(self.config.discount)

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
