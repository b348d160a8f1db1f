"""What the previous token used: a floor for other predictors. T tokens, E routed experts per layer."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from expertcast.predictors.base import Forecast, RouterState
from expertcast.predictors.frequency import Frequency


class PreviousToken(Frequency):
    """The routing that the previous token had at the target layer; `frequency` where there is no previous token.

    Needs `RouterState.previous_logits_TLE`.
    """

    name: ClassVar[str] = "previous_token"
    uses_previous_token = True

    def logits(self, state: RouterState, ahead: int) -> Tensor:
        """The previous token's logits [T, E] at the target layer, log frequencies in rows without one."""
        fallback_TE = super().logits(state, ahead)
        if state.previous_logits_TLE is None:
            return fallback_TE
        previous_TE = state.previous_logits_TLE[:, state.layer + ahead]
        return torch.where(previous_TE.isnan(), fallback_TE.to(previous_TE.dtype), previous_TE)

    def _forecast(self, state: RouterState, target: int, ahead: int) -> Forecast:
        fallback = super()._forecast(state, target, ahead)
        if state.previous_logits_TLE is None:
            return fallback
        known_T1 = ~state.previous_logits_TLE[:, target, :1].isnan()
        ids_TK, weights_TK = self.view[target].route(fallback.logits_TE)
        return Forecast(
            layer=target,
            logits_TE=fallback.logits_TE,
            topk_ids_TK=torch.where(known_T1, ids_TK, fallback.topk_ids_TK),
            topk_weights_TK=torch.where(known_T1, weights_TK, fallback.topk_weights_TK.to(weights_TK.dtype)),
        )
