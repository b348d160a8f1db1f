"""What a layer used most often: a floor that other predictors are held against.

T tokens, L MoE layers, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from expertcast.predictors.base import Forecast, Predictor, PredictorConfig, RouterState
from expertcast.predictors.view import ModelShape


class Frequency(Predictor):
    """Forecasts the K experts with the highest counts at the target layer.

    Ids come from the counts themselves, not from the router's rule over log counts: a correction bias would
    reorder them. Weights are the experts' mean combine weights, scaled to the layer's mean total.
    """

    name: ClassVar[str] = "frequency"
    reads_residual = False
    traceable = True
    count_LE: Tensor
    weight_sum_LE: Tensor

    def __init__(self, config: PredictorConfig, shape: ModelShape) -> None:
        super().__init__(config, shape)
        size = (shape.layers, shape.experts)
        self.register_buffer("count_LE", torch.zeros(size, dtype=torch.int64))
        self.register_buffer("weight_sum_LE", torch.zeros(size))

    def observe(self, layer: int, ids_TK: Tensor, weights_TK: Tensor) -> None:
        """Add the routing of T tokens at one layer to the counts."""
        ids, weights = ids_TK.flatten(), weights_TK.flatten().float()
        self.count_LE[layer].index_add_(0, ids, torch.ones_like(ids))
        self.weight_sum_LE[layer].index_add_(0, ids, weights)

    def logits(self, state: RouterState, ahead: int) -> Tensor:
        """Log of the share of routings (with one added to each count), the same [E] row for every token."""
        count_E = self.count_LE[state.layer + ahead].float() + 1
        return (count_E / count_E.sum()).log().expand(state.logits_TE.shape[0], -1)

    def _forecast(self, state: RouterState, target: int, ahead: int) -> Forecast:
        tokens = state.logits_TE.shape[0]
        count_E, weight_sum_E = self.count_LE[target], self.weight_sum_LE[target]
        ids_K = count_E.topk(self.shape.top_k).indices
        weights_K = weight_sum_E[ids_K] / count_E[ids_K].clamp(min=1)
        mean_total = weight_sum_E.sum() * self.shape.top_k / count_E.sum().clamp(min=1)
        weights_K = weights_K * (mean_total / weights_K.sum().clamp(min=torch.finfo(torch.float32).tiny))
        return Forecast(
            layer=target,
            logits_TE=self.logits(state, ahead),
            topk_ids_TK=ids_K.expand(tokens, -1),
            topk_weights_TK=weights_K.to(state.topk_weights_TK.dtype).expand(tokens, -1),
        )
