"""Forecasts to keys, in the order in which they should be copied.

T tokens, E routed experts per layer, K experts per token. An expert's key is layer * E + expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from expertcast.predictors.base import Forecast
from expertcast.predictors.errors import ExpertcastError


class Prefetcher:
    """Orders a forecast's experts: the forecast's own ids by weight, then further ones by probability.

    Args:
        overfetch: experts asked for per token, as a multiple of K (1.0: the forecast's own ids only).
    """

    def __init__(self, experts: int, top_k: int, overfetch: float = 1.0) -> None:
        if overfetch < 1.0:
            raise ExpertcastError(f"overfetch={overfetch}: give 1.0 or more, such as 1.5 for half as many again")
        self._experts = experts
        self._budget = min(experts, round(overfetch * top_k))
        self._top_k = top_k

    def keys(self, forecast: Forecast, ids: list[list[int]], weights: list[list[float]]) -> list[int]:
        """Keys of the experts that the forecast wants on the device, most needed first.

        Args:
            ids, weights: the forecast's own, T rows of K, on the host.
        """
        experts = _by_weight(ids, weights)
        if self._budget > self._top_k:
            experts += self._further(forecast, set(experts))
        first = forecast.layer * self._experts
        return [first + expert for expert in experts]

    def ids(self, forecast: Forecast) -> Tensor:
        """Experts [N] for the device-side link: each token's first, each one's second ...; some may come twice."""
        ids_N = forecast.topk_ids_TK.t().reshape(-1)
        if self._budget <= self._top_k:
            return ids_N
        further_N = forecast.logits_TE.topk(self._budget, dim=-1).indices.t().reshape(-1)
        return torch.cat([ids_N, further_N])

    def _further(self, forecast: Forecast, chosen: set[int]) -> list[int]:
        """Experts within any token's budget by logits, by falling probability summed over tokens."""
        probability_E = forecast.logits_TE.float().softmax(dim=-1).sum(dim=0).tolist()
        ranked = forecast.logits_TE.topk(self._budget, dim=-1).indices.reshape(-1).tolist()
        return sorted(set(ranked) - chosen, key=lambda expert: -probability_E[expert])


def _by_weight(ids: list[list[int]], weights: list[list[float]]) -> list[int]:
    """Experts by falling weight, summed over tokens."""
    weight: dict[int, float] = {}
    for row_ids, row_weights in zip(ids, weights, strict=True):
        for expert, value in zip(row_ids, row_weights, strict=True):
            weight[expert] = weight.get(expert, 0.0) + value
    return sorted(weight, key=weight.__getitem__, reverse=True)
