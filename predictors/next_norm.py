"""The residual under a later layer's norm, sent through that layer's router. T tokens, D hidden size."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from expertcast.predictors.base import RouterState
from expertcast.predictors.through_router import ThroughRouter


class NextNorm(ThroughRouter):
    """Takes this layer's residual for that of a later one, under the later one's norm.

    It stands between `router_input` and `quasi_hidden`, so that the gain of the target's norm and the gain of the
    default vectors can be told apart (trap 4 under system B).
    """

    name: ClassVar[str] = "next_norm"

    def input_vector(self, state: RouterState, ahead: int) -> Tensor:
        """LN_{l+ahead}(r_l) [T, D]."""
        return self.view[state.layer + ahead].router_input(state.residual_TD)
