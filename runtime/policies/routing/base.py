"""Routing with an eye on the cache: which experts a layer executes.

T tokens, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from expertcast.predictors.view import MoELayer
from expertcast.runtime.policies.registry import Policy


@dataclass(slots=True, kw_only=True)
class Routed:
    """What a router said, and what the cache holds."""

    layer: MoELayer
    logits_TE: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    cached_E: Tensor
    """bool: the layer's experts that have a slot; on the device of the logits."""
    available: int
    """Free slots that the layer's misses may take without evicting (C_avail, eq. 18 of ActiveEvict)."""


class RoutingPolicy(Policy):
    """May choose other experts than the router; ids stay T x K, an expert that is not to run gets weight 0."""

    lossy: ClassVar[bool] = True
    """Whether the output may differ from the resident model's."""

    @abstractmethod
    def route(self, routed: Routed) -> tuple[Tensor, Tensor] | None:
        """(ids [T, K], weights [T, K]) to execute; None: the router's own. A place with weight 0 is not executed: it
        may name any expert."""
