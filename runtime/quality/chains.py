"""Recall of forecasts made from forecasts, with the model at hand: the form in which speculation makes them.

The model runs its own routing, so that its residuals stay true; each layer's forecast is made from the routing that was
forecast for that layer (trap 2 of the definitions under row B19), early attention included, which no trace can tell.

N windows, W tokens per window, T = B x W tokens, L MoE layers, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing

import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast.data.router_call import RouterCall
from expertcast.data.taps import RouterTaps
from expertcast.predictors import MoEView, Predictor
from expertcast.runtime.engine.speculate import speculate
from expertcast.runtime.quality.forecasts import previous_logits
from expertcast.training.metrics.means import Recall


@torch.no_grad()
def chained_recall(
    model: PreTrainedModel, view: MoEView, windows_NW: Tensor, predictors: Mapping[str, Predictor], batch_size: int = 8
) -> dict[str, list[float]]:
    """Recall@k of layers 1..L-1 by predictor, each forecast made from the one before it.

    Args:
        model: its experts in memory.
        view: its norms and routers.
        windows_NW: token ids; what a predictor reads of the previous token is the model's own routing of it.
        predictors: by name, bound to `view`.
        batch_size: windows per forward.
    """
    recall = {name: Recall(len(view), sync_on_compute=False) for name in predictors}
    for ids_BW in torch.split(windows_NW, batch_size):
        previous_TLE = _own_previous(model, view, ids_BW)
        for name, predictor in predictors.items():

            def observe(call: RouterCall, ids_TK: Tensor, own: Recall = recall[name]) -> None:
                own.to(ids_TK.device).update(call.layer, ids_TK, call.ids_TK)

            with speculate(model, view, predictor, execute=False, observe=observe) as speculator:
                speculator.previous_logits_TLE = previous_TLE
                model.base_model(input_ids=ids_BW.to(model.device), use_cache=False)
    return {name: own.per_row()[1:].tolist() for name, own in recall.items()}


def _own_previous(model: PreTrainedModel, view: MoEView, ids_BW: Tensor) -> Tensor:
    """What the model's own routing of each window's tokens says of the token before, [T, L, E]."""
    logits: list[Tensor] = []
    with closing(RouterTaps(model, view, lambda call: logits.append(call.logits_TE))):
        model.base_model(input_ids=ids_BW.to(model.device), use_cache=False)
    return previous_logits(logits, ids_BW)
