"""How a draft's forwards run the model's MoE layers.

T tokens, D hidden size, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from expertcast.data.router_call import RouterCall
from expertcast.predictors.view import MoELayer
from expertcast.runtime.drafts.quantised import QuantisedExperts
from expertcast.runtime.drafts.schedule import Schedule
from expertcast.runtime.engine.base import EngineParts
from expertcast.runtime.engine.host import HostEngine
from expertcast.runtime.engine.residency import Residency
from expertcast.runtime.engine.speculation import Speculator
from expertcast.runtime.links.base import Link
from expertcast.runtime.policies import CacheShape, Policies


class QuantisedStage:
    """All experts are resident in less precision: nothing is waited for (rows C1 and C12)."""

    def __init__(self, experts: QuantisedExperts, schedule: Schedule, link: Link) -> None:
        self._experts, self._schedule, self._link = experts, schedule, link

    def on_start(self, fresh: bool, token_BS: Tensor | None = None) -> None:
        del fresh, token_BS
        self._link.follow()

    def on_router(self, call: RouterCall) -> None:
        self._schedule.routed(call)

    def run(self, layer: MoELayer, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        output_TD = self._experts.run(layer, hidden_TD, ids_TK, weights_TK)
        self._schedule.load()
        return output_TD


class PolicyStage:
    """Lossy policies decide over the same slots: a draft with what is on the device."""

    def __init__(self, parts: EngineParts, policies: Policies, residency: Residency, schedule: Schedule) -> None:
        shape = parts.speculator.view.shape
        made = policies.make(
            CacheShape(layers=shape.layers, experts=shape.experts, top_k=shape.top_k, slots=parts.pool.count)
        )
        made.eviction = residency.eviction
        self.precisions = made.miss.precisions
        """Copies beside the full experts that the store must hold."""
        speculator = Speculator(parts.speculator.view, None)
        self._residency, self._schedule = residency, schedule
        self._engine = HostEngine(
            replace(parts, speculator=speculator, policies=made, tokens_ahead=None, drift=None, gated=False), residency
        )

    def on_start(self, fresh: bool, token_BS: Tensor | None = None) -> None:
        self._engine.go_on()
        self._engine.on_start(fresh, token_BS)

    def on_router(self, call: RouterCall) -> tuple[Tensor, Tensor] | None:
        self._residency.only_arrived = True
        try:
            executed = self._engine.on_router(call)
        finally:
            self._residency.only_arrived = False
        self._schedule.routed(call)
        return executed

    def run(self, layer: MoELayer, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return self._engine.run(layer, hidden_TD, ids_TK, weights_TK)
