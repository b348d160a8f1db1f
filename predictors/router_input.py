"""s_l through the router of layer l + ahead: the next-layer gate of Eliseev and Mazur, rows A18, A19 and B4."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from expertcast.predictors.base import RouterState
from expertcast.predictors.through_router import ThroughRouter


class RouterInput(ThroughRouter):
    """Takes the router input of this layer for that of a later one."""

    name: ClassVar[str] = "router_input"

    def input_vector(self, state: RouterState, ahead: int) -> Tensor:
        """s_l [T, D], as the router of layer l read it."""
        del ahead
        return state.router_input_TD
