"""Forecasts and links made by hand."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from expertcast.predictors.base import Forecast
from expertcast.runtime.policies.prefetch import Transfer, Wanted


def wanted(logits_TE: Tensor, top_k: int, layer: int = 1) -> Wanted:
    """A forecast whose own experts are those with the highest logits."""
    probability_TE = logits_TE.float().softmax(dim=-1)
    weights_TK, ids_TK = probability_TE.topk(top_k, dim=-1)
    forecast = Forecast(layer=layer, logits_TE=logits_TE, topk_ids_TK=ids_TK, topk_weights_TK=weights_TK)
    return Wanted(forecast, ids_TK.tolist(), weights_TK.tolist())


def of_probabilities(rows: list[list[float]], top_k: int, layer: int = 1) -> Wanted:
    """A forecast with these softmax probabilities."""
    return wanted(torch.tensor(rows).log(), top_k, layer)


def transfer(
    *,
    copy_s: float = 1.0,
    backlog_s: float = 0.0,
    left_s: float = 100.0,
    free: int = 0,
    worth: float = 0.0,
    resident: Collection[int] = (),
) -> Transfer:
    return Transfer(
        copy_s=copy_s,
        backlog_s=backlog_s,
        left_s=left_s,
        free=free,
        resident=lambda expert: expert in resident,
        victim_worth=lambda: worth,
    )
