"""One offloaded forward, layer by layer: request, forecast, prefetch, wait, compute, release.

T tokens, D hidden size, E routed experts per layer, K experts per token. An expert's key is layer * E + expert.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from expertcast.data.router_call import RouterCall
from expertcast.predictors.view import MoELayer
from expertcast.runtime.engine.base import Engine, EngineParts
from expertcast.runtime.engine.flow import LayerFlow
from expertcast.runtime.engine.foresight import Foresight
from expertcast.runtime.engine.gate import ForecastGate
from expertcast.runtime.engine.plan import Plan
from expertcast.runtime.engine.residency import Residency
from expertcast.runtime.engine.rows import row_order
from expertcast.runtime.links.exchange import Readback, Sent
from expertcast.runtime.policies.eviction.base import PROMPT_ROWS
from expertcast.runtime.recording.statistics import RunStatistics

_FEW_IDS = 512
"""Up to so many ids a list serves better than a table of all experts."""


class HostEngine(Engine):
    """Drives flow and kernel from the host, which reads every layer's routing back.

    Args:
        parts: what it drives.
        residency: books and rules that are shared with another engine of the model; none makes its own.
    """

    def __init__(self, parts: EngineParts, residency: Residency | None = None) -> None:
        super().__init__(parts)
        speculator, policies, shape = parts.speculator, parts.policies, parts.speculator.view.shape
        if residency is None:
            stats = RunStatistics(shape.layers)
            residency = Residency(
                parts.pool, parts.link, policies.eviction, stats, experts=shape.experts, keep=parts.keep
            )
        self._residency = residency
        self.stats = residency.stats
        carry = 0 if speculator.predictor is None else speculator.ahead
        self._flow = LayerFlow(
            residency, policies, shape, view=speculator.view, carry=carry, tokens_ahead=parts.tokens_ahead,
            likely=parts.likely,
        )  # fmt: skip
        gated = parts.gated and residency.keep
        self._observer = residency.observer
        self._last = shape.layers - 1
        self._readback = Readback(parts.link.driver, parts.link.progress)
        gate = ForecastGate(residency, shape.layers, self._flow.tokens_ahead) if gated else None
        self._foresight = Foresight(speculator, self._flow, self._readback, gate=gate, told=self._told)
        self._plan: Plan | None = None
        self._drift, self._refit = parts.drift, speculator.refit

    @property
    def flow(self) -> LayerFlow:
        return self._flow

    def limit(self, layer: int) -> int:
        return self._residency.limit(layer)

    def held(self, layer: int) -> list[int]:
        return list(self._residency.held(layer))

    def on_start(self, fresh: bool, token_BS: Tensor | None = None) -> None:
        if self.stage is not None:
            self.stage.on_start(fresh, token_BS)
            return
        self._residency.link.follow()
        self._plan = None
        self._foresight.start()
        halfway, self._halfway = self._halfway, True
        complete, self._complete = self._complete, False
        if halfway:
            self._residency.reset()
        elif fresh or not complete:
            self._residency.abandon()
        self._flow.start_pass(fresh, token_BS)
        self._halfway = False
        self._speculator.start(fresh)
        if self._drift is not None:
            self._drift.start()

    def on_router(self, call: RouterCall) -> tuple[Tensor, Tensor] | None:
        if self.stage is not None:
            return self.stage.on_router(call)
        self._halfway = True
        if self.ahead is not None:
            self.ahead.routed(call)
        if self._told is not None:
            self._told("policy", call.layer)
        executed = forecast_executed = self._speculator.executed(call)
        precision = None
        self._observer.routed(call.layer, call.residual_TD, call.logits_TE)
        logits_TE = self._speculator.executed_logits(call, executed)
        ids_TK = call.ids_TK if executed is None else executed[0]
        if self._flow.reads_logits:
            self._flow.see(call.layer, call.residual_TD, logits_TE, call.sequences)
        if call.tokens > 1 and self._flow.policies.eviction.reads_routing:
            rows = self._readback.start(ids_TK[-PROMPT_ROWS:]).tolist()
            self._flow.policies.eviction.see_routing(call.layer, rows)
        if self._flow.decides:
            executed, precision = self._decide(call, executed, logits_TE)
            ids_TK = call.ids_TK if executed is None else executed[0]
        known = self._foresight.ids.get(call.layer)
        plan = self._begin(call.layer, ids_TK, executed is not None and executed is forecast_executed, precision)
        routed = executed is None or not self._speculator.router_free
        if known is not None and self._drift is not None and routed:
            self._drift.compare(call, known, plan.ids if executed is None else None, self._readback)
        self._foresight.make(call, executed, len(plan.chunks) == 1)
        if self._refit is not None:
            self._refit.work()
        if self._told is not None:
            self._told("compute", call.layer)
        self._halfway = False
        return executed

    def _decide(
        self, call: RouterCall, executed: tuple[Tensor, Tensor] | None, logits_TE: Tensor
    ) -> tuple[tuple[Tensor, Tensor] | None, dict[int, str] | None]:
        """What routing and miss policies make of what would be executed, and the precision it comes in."""
        ids_TK, weights_TK = (call.ids_TK, call.weights_TK) if executed is None else executed
        decision = self._flow.decide(call.layer, logits_TE, ids_TK, weights_TK, routed=executed is None)
        if decision is None:
            return executed, None
        return (decision.ids_TK, decision.weights_TK), decision.precision

    def run(self, layer: MoELayer, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        self._halfway = True
        if self._told is not None:
            self._told("policy", layer.index)
        self._check_untouched(layer)
        plan = self._plan
        if plan is None or plan.layer != layer.index or not (plan.ids_TK is ids_TK or torch.equal(plan.ids_TK, ids_TK)):
            plan = self._begin(layer.index, ids_TK, False)
        self._plan = None
        self._observer.ran(layer.index, len(plan.chunks))
        if len(plan.chunks) == 1:
            output_TD = self._run_whole(layer, plan, hidden_TD, ids_TK, weights_TK)
        else:
            output_TD = self._run_chunks(layer, hidden_TD, weights_TK, self._chunks(plan, ids_TK.reshape(-1)))
        self._foresight.take()
        self._complete = layer.index == self._last
        if self._told is not None:
            self._told("compute", layer.index + 1)
        self._halfway = False
        return output_TD

    def _begin(self, layer: int, ids_TK: Tensor, forecast: bool, precision: dict[int, str] | None = None) -> Plan:
        """Request what a layer executes; `forecast`: these are the ids of the layer's forecast."""
        first = layer * self._experts
        flat: list[int] | None = self._foresight.ids.pop(layer, None)
        if not forecast or flat is None:
            few = ids_TK.numel() <= _FEW_IDS
            flat = self._readback.start(ids_TK.reshape(-1)).tolist() if few else None
        if flat is not None and len(flat) <= _FEW_IDS:
            all_keys, pairs = [first + expert for expert in flat], None
            distinct = list(dict.fromkeys(all_keys))
        else:
            all_keys = None
            ids_P = ids_TK.reshape(-1).long()
            counts_E = ids_P.new_zeros(self._experts).scatter_add_(0, ids_P, torch.ones_like(ids_P))
            counts = self._readback.start(counts_E).tolist()  # torch.unique would keep the host from the link
            pairs = {first + expert: count for expert, count in enumerate(counts) if count}
            distinct = list(pairs)
        self._foresight.learn(layer, distinct)
        if self.ahead is not None:
            self.ahead.reached(layer, distinct)
        chunks = self._flow.begin(layer, distinct, precision)
        plan = self._plan = Plan(layer, ids_TK, all_keys, pairs, chunks, precision, flat)
        if len(chunks) == 1:
            self._send_slots(plan)
        if self.ahead is not None:
            self.ahead.load()
        return plan

    def _send_slots(self, plan: Plan) -> None:
        """Before the copies of forecasts are issued: they would have to wait for those."""
        if plan.keys is None:
            plan.sent = self._send_table(plan.layer, plan.chunks[0])
        else:
            slot_of = self._pool.slots
            plan.slots = [slot_of[key] for key in plan.keys]
            plan.sent = self._residency.link.send(plan.slots)

    def _run_whole(self, layer: MoELayer, plan: Plan, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        (keys,) = plan.chunks
        assert plan.sent is not None
        self._wait(layer.index, keys)
        sent = plan.sent.take()
        slots_TK = sent[ids_TK] if plan.slots is None else sent.view(ids_TK.shape)
        output_TD = self._kernel.run(layer.experts, hidden_TD, slots_TK, weights_TK, ids_TK, plan.slots)
        if self._told is not None:
            self._told("policy", layer.index)
        self._residency.release(keys)
        return output_TD

    def _chunks(self, plan: Plan, ids_P: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """A chunk's pairs with their slots, once its copies are waited for; the next one loads meanwhile."""
        order_P, count = self._chunk_order(plan, ids_P), plan.pairs or Counter(plan.keys)
        start = 0
        for keys, following in zip(plan.chunks, [*plan.chunks[1:], None], strict=True):
            sent = self._send_table(plan.layer, keys)  # before the next copies, for which it would have to wait
            if following is None:
                self._flow.stream(plan.layer)
            else:
                self._residency.request(following, plan.precision)
            end = start + sum(count[key] for key in keys)
            pairs = order_P[start:end]
            slots = sent.take()[ids_P[pairs]]
            self._wait(plan.layer, keys)
            yield pairs, slots
            self._residency.release(keys)
            start = end

    def _chunk_order(self, plan: Plan, ids_P: Tensor) -> Tensor:
        """All pairs, chunk by chunk, each chunk's in :func:`row_order`. Asks the device for nothing."""
        first, number_E = plan.layer * self._experts, [0] * self._experts
        for number, keys in enumerate(plan.chunks):
            for key in keys:
                number_E[key - first] = number
        order_P = row_order(ids_P)
        number_P = self._residency.link.send(number_E).take()[ids_P[order_P]]
        return order_P[number_P.sort(stable=True).indices]

    def _wait(self, layer: int, keys: list[int]) -> None:
        if self._told is not None:
            self._told("wait", layer)
        self._residency.wait(keys)
        if self._told is not None:
            self._told("compute", layer)

    def _send_table(self, layer: int, keys: list[int]) -> Sent:
        """[E] slot of each expert, -1 where it has none in this chunk."""
        table = [-1] * self._experts
        first = layer * self._experts
        for key in keys:
            table[key - first] = self._pool.slots[key]
        return self._residency.link.send(table)
