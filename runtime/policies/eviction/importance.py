"""Importance: recent use and forecast together (rows D3 to D5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.policies.eviction.victims import Rescored, Scores
from expertcast.runtime.policies.registry import CacheShape, PolicyConfig

_HEAVY = 1e100
"""A use's weight from which on a layer's weights are scaled down."""


@dataclass(frozen=True, kw_only=True)
class ImportanceConfig(PolicyConfig):
    """How past use and forecast are weighed against each other."""

    alpha: float = 0.5
    """Share of past use; the rest is the forecast's (1: decayed counts alone, 0: forecasts alone)."""
    gamma: float = 0.9
    """What a use is worth after one more step of its layer, over 0 up to 1."""

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ExpertcastError(f"alpha={self.alpha}: give a share from 0 to 1")
        if not 0 < self.gamma <= 1:
            raise ExpertcastError(f"gamma={self.gamma}: give a decay over 0, up to 1 for none")


class Importance(Rescored):
    """Gives up the expert with the lowest s = alpha h + (1 - alpha) p; ties by h.

    h is the decayed count of the expert's uses and p its probability in the forecast for its own layer (trap 2 under
    row D13), both as shares of the layer's residents; with nothing to share all have the same share (trap 3). A layer's
    last forecast stands until the next one: between runs of the layer it is the newest that is known. The sum over
    residents is taken once per change of the layer's uses or forecast, as the paper ranks once and then evicts in
    ascending order. The paper's window of T tokens is left out: at gamma 0.9 what lies 64 steps back weighs 0.001.
    """

    name = "importance"
    config_class = ImportanceConfig
    config: ImportanceConfig
    reads_forecasts = True

    def __init__(self, config: ImportanceConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._use = [1.0] * shape.layers
        """What a use weighs now: it grows by 1 / gamma per step, so that nothing else needs to decay."""
        self._hotness = [[0.0] * shape.experts for _ in range(shape.layers)]
        """[L][E] weight of all uses."""
        self._forecast: dict[int, Sequence[float]] = {}
        """[E] by layer, the last ones."""

    def see_forecast(self, layer: int, probability_E: Sequence[float]) -> None:
        self._forecast[layer] = probability_E
        self._changed.add(layer)

    def start_layer(self, layer: int, keys: Sequence[int]) -> None:
        self._use[layer] /= self.config.gamma
        if self._use[layer] > _HEAVY:
            self._hotness[layer] = [value / self._use[layer] for value in self._hotness[layer]]
            self._use[layer] = 1.0

    def use(self, keys: Sequence[int]) -> None:
        layer = keys[0] // self.shape.experts
        first, weight, hotness_E = layer * self.shape.experts, self._use[layer], self._hotness[layer]
        for key in keys:
            hotness_E[key - first] += weight
        self._changed.add(layer)

    def _score(self, layer: int) -> Scores:
        alpha, residents = self.config.alpha, self._ranking[layer]
        hotness_E, forecast_E = self._hotness[layer], self._forecast.get(layer)
        uses = sum(map(hotness_E.__getitem__, residents))
        chances = 0.0 if forecast_E is None else sum(map(forecast_E.__getitem__, residents))
        equal = ((0.0 if uses else alpha) + (0.0 if chances else 1 - alpha)) / max(1, len(residents))
        per_use = alpha / uses if uses else 0.0
        if forecast_E is None or not chances:
            return Scores(hotness_E, per_use, equal)
        per_chance = (1 - alpha) / chances
        return Scores([per_use * u + per_chance * p for u, p in zip(hotness_E, forecast_E, strict=True)], 1.0, equal)
