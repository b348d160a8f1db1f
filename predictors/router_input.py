"""The router's own input sent through a later layer's router. T tokens, D hidden size."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from expertcast.predictors.base import RouterState
from expertcast.predictors.through_router import ThroughRouter


class RouterInput(ThroughRouter):
    """Takes the router input of this layer for that of a later one: the next-layer gate of Eliseev and Mazur, rows A18,
    A19 and B4."""

    name: ClassVar[str] = "router_input"
    reads_residual = False

    def input_vector(self, state: RouterState, ahead: int) -> Tensor:
        """s_l [T, D], as the router of layer l read it."""
        return state.router_input_TD
