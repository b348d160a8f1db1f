"""The predictors that send a stand-in for s_{l+ahead} through the target layer's own router.

T tokens, D hidden size, E routed experts per layer, K experts per token. `quasi_hidden` is one more of them.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

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
        logits_TE, weights_TK, ids_TK = self.view[target].router(self.input_vector(state, ahead))
        return Forecast(layer=target, logits_TE=logits_TE, topk_ids_TK=ids_TK, topk_weights_TK=weights_TK)


class RouterInput(ThroughRouter):
    """Takes the router input of this layer for that of a later one: the next-layer gate of Eliseev and Mazur, rows A18,
    A19 and B4."""

    name: ClassVar[str] = "router_input"

    def input_vector(self, state: RouterState, ahead: int) -> Tensor:
        """s_l [T, D], as the router of layer l read it."""
        return state.router_input_TD


class NextNorm(ThroughRouter):
    """Takes this layer's residual for that of a later one, under the later one's norm.

    It stands between `router_input` and `quasi_hidden`, so that the gain of the target's norm and the gain of the
    default vectors can be told apart (trap 4 under system B).
    """

    name: ClassVar[str] = "next_norm"

    def input_vector(self, state: RouterState, ahead: int) -> Tensor:
        """LN_{l+ahead}(r_l) [T, D]."""
        return self.view[state.layer + ahead].router_input(state.residual_TD)
