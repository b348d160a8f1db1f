"""The router's own choice (row A2)."""

from __future__ import annotations

from expertcast.runtime.policies.routing.base import Routed, RoutingPolicy


class Standard(RoutingPolicy):
    """Leaves the routing as it is."""

    name = "standard"
    lossy = False

    def route(self, routed: Routed) -> None:
        del routed
