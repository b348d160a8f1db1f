"""Base of the predictors that send a stand-in for s_{l+ahead} through the target layer's own router.

T tokens, D hidden size, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from expertcast.predictors.base import Forecast, Predictor, RouterState


class ThroughRouter(Predictor):
    """Subclasses give :meth:`input_vector`; ids and weights are what the target's router returns for it."""

    traceable = True

    @abstractmethod
    def input_vector(self, state: RouterState, ahead: int) -> Tensor:
        """The [T, D] vector that stands for s_{l+ahead}."""

    def logits(self, state: RouterState, ahead: int) -> Tensor:
        return self.view[state.layer + ahead].router_logits(self.input_vector(state, ahead))

    def _forecast(self, state: RouterState, target: int, ahead: int) -> Forecast:
        # the router's own three outputs: a second run of it for the routing rule would cost a decode step twice
        logits_TE, weights_TK, ids_TK = self.view[target].routed(self.input_vector(state, ahead))
        return Forecast(layer=target, logits_TE=logits_TE, topk_ids_TK=ids_TK, topk_weights_TK=weights_TK)
