"""The forecast's own experts, and further ones by probability (row A20)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from expertcast.predictors.base import Forecast
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.view import overfetched
from expertcast.runtime.policies.prefetch.base import PrefetchPolicy, Transfer, Wanted
from expertcast.runtime.policies.registry import CacheShape, PolicyConfig

MOST_OVERFETCH = 65_536


@dataclass(frozen=True, kw_only=True)
class TopKConfig(PolicyConfig):
    """How many experts are asked for."""

    overfetch: float = 1.0
    """Experts asked for per token, as a multiple of K, rounded up (1.0: the forecast's own only)."""

    def __post_init__(self) -> None:
        if not 1.0 <= self.overfetch <= MOST_OVERFETCH:
            raise ExpertcastError(
                f"overfetch={self.overfetch}: give 1.0 to {MOST_OVERFETCH}, such as 1.5 for half as many again"
            )


class TopK(PrefetchPolicy):
    """The forecast's own ids by falling weight, then those within any token's budget by falling probability."""

    name = "top_k"
    config_class = TopKConfig

    def __init__(self, config: TopKConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._budget = overfetched(config.overfetch, shape.top_k, shape.experts)

    def experts(self, wanted: Wanted, transfer: Transfer | None) -> list[int]:
        experts = by_weight(wanted.ids, wanted.weights)
        if self._budget > self.shape.top_k:
            experts += self._further(wanted, set(experts))
        return experts

    def device_ids(self, forecast: Forecast) -> Tensor:
        ids_N = forecast.topk_ids_TK.t().reshape(-1)
        if self._budget <= self.shape.top_k:
            return ids_N
        further_N = forecast.logits_TE.topk(self._budget, dim=-1).indices.t().reshape(-1)
        return torch.cat([ids_N, further_N])

    def _further(self, wanted: Wanted, chosen: set[int]) -> list[int]:
        probability_E = wanted.probability_TE.sum(dim=0).tolist()
        ranked = wanted.probability_TE.topk(self._budget, dim=-1).indices.reshape(-1).tolist()
        return sorted(set(ranked) - chosen, key=lambda expert: -probability_E[expert])


def by_weight(ids: Sequence[Sequence[int]], weights: Sequence[Sequence[float]]) -> list[int]:
    """Experts by falling weight, summed over tokens."""
    weight: dict[int, float] = {}
    for row_ids, row_weights in zip(ids, weights, strict=True):
        for expert, value in zip(row_ids, row_weights, strict=True):
            weight[expert] = weight.get(expert, 0.0) + value
    return sorted(weight, key=weight.__getitem__, reverse=True)
