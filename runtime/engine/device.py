"""One offloaded forward without the host: tables, copies and kernels follow each other on the device.

For :class:`expertcast.runtime.links.kernel.KernelLink`. A decode step whose T x K ids fit the slots asks the device for
no value, so that it can be captured in a CUDA graph. A step that names more experts than there are slots runs in
chunks, which the host counts out.

T tokens, D hidden size, E routed experts per layer, K experts per token, P token-expert pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from expertcast.data.taps import RouterCall, capturing
from expertcast.predictors.base import Forecast
from expertcast.predictors.view import MoELayer
from expertcast.runtime.engine.host import Engine
from expertcast.runtime.engine.kernels import SlotKernel, combine, row_order
from expertcast.runtime.engine.speculation import Speculator
from expertcast.runtime.links.kernel import KernelLink
from expertcast.runtime.policies.prefetch import PrefetchPolicy
from expertcast.runtime.recording.observer import Observer, State
from expertcast.runtime.storage.slots import SlotPool


class DeviceEngine(Engine):
    """The same interface as :class:`Engine`, and its rules for what is loaded when.

    Args:
        keep: False gives a layer's slots back as soon as it has run.
    """

    def __init__(
        self,
        link: KernelLink,
        pool: SlotPool,
        speculator: Speculator,
        prefetch: PrefetchPolicy,
        kernel: SlotKernel,
        observer: Observer,
        *,
        keep: bool = True,
    ) -> None:
        self._link = link
        self._tables = link.residency
        self._pool = pool
        self._speculator = speculator
        self._prefetch_policy = prefetch
        self._kernel = kernel
        self._observer = observer
        self._keep = keep
        self._experts = speculator.view.shape.experts
        self._pointers = {name: view.data_ptr() for name, view in pool.views.items()}
        self._ids_TK: Tensor | None = None
        """What the running layer was prepared for."""
        self._layer = -1
        self._ticket = 0
        """Calls of the link that the running layer waits for."""
        self._halfway = False
        """Tables say more than has been copied: only when a call was cut short."""

    def on_start(self, fresh: bool) -> None:
        """A forward starts. The tables stay true whatever cut the last one short, but for a call between the two."""
        self._link.follow()
        if self._halfway:
            self._tables.clear()
            self._halfway = False
        self._ids_TK = None
        self._ticket = 0
        self._speculator.start(fresh)

    def on_router(self, call: RouterCall) -> tuple[Tensor, Tensor] | None:
        """Misses of this layer go out first, then its forecast's."""
        self._enter("policy", call.layer)
        executed = self._speculator.executed(call)
        self._prepare(call.layer, call.ids_TK if executed is None else executed[0])
        self._enter("forecast", call.layer)
        forecast = self._speculator.forecast(call, executed)
        self._enter("policy", call.layer)
        if forecast is not None:
            self._expect(forecast, running=self._tables.width(call.ids_TK))
        self._enter("compute", call.layer)
        return executed

    def run(self, layer: MoELayer, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The layer's experts over their slots."""
        self._enter("policy", layer.index)
        self._check_untouched(layer)
        if not self._fits(ids_TK):
            output_TD = self._run_in_chunks(layer, hidden_TD, ids_TK, weights_TK)
        else:
            if ids_TK is not self._ids_TK or layer.index != self._layer:  # another hook changed the routing after ours
                self._prepare(layer.index, ids_TK)
            slots_TK = self._tables.slots_for(layer.index, ids_TK)
            self._join(layer.index, self._ticket)
            output_TD = self._kernel.run(layer.experts, hidden_TD, slots_TK, weights_TK, ids_TK)
        self._enter("policy", layer.index)
        self._tables.finish(layer.index, keep=self._keep)
        self._ids_TK = None
        self._enter("compute", layer.index + 1)
        return output_TD

    def _enter(self, state: State, layer: int) -> None:
        if not capturing():
            self._observer.enter(state, layer)

    def _fits(self, ids_TK: Tensor) -> bool:
        return self._tables.width(ids_TK) <= self._pool.count

    def _prepare(self, layer: int, ids_TK: Tensor) -> None:
        """Start the copies of what a layer misses; steps that need chunks start theirs chunk by chunk."""
        if self._fits(ids_TK):
            self._ticket = self._bring(layer, ids_TK)
            self._layer, self._ids_TK = layer, ids_TK

    def _bring(self, layer: int, ids_TK: Tensor, within_E: Tensor | None = None) -> int:
        """Start copies; returns the calls to wait for."""
        self._halfway = True
        self._link.move(self._tables.bring(layer, ids_TK, within_E), layer)
        self._halfway = False
        return self._link.ticket()

    def _expect(self, forecast: Forecast, running: int) -> None:
        if self._pool.count <= running:
            return
        self._halfway = True
        ids_N = self._prefetch_policy.device_ids(forecast)
        assert ids_N is not None, "offload lets only such selections through"
        moves = self._tables.expect(forecast.layer, ids_N, running)
        self._link.move(moves, forecast.layer, urgent=False)
        self._halfway = False

    def _join(self, layer: int, ticket: int) -> None:
        self._enter("wait", layer)
        self._link.join(ticket)
        self._enter("compute", layer)

    def _run_in_chunks(self, layer: MoELayer, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The same products in several kernel calls, one reduction at the end; a chunk loads while another computes."""
        top_k = ids_TK.shape[1]
        ids_P, order_P = ids_TK.reshape(-1), row_order(ids_TK)
        output_PD = hidden_TD.new_empty(ids_P.shape[0], hidden_TD.shape[1])
        chunks = self._chunks_of(layer.index, ids_P)
        ticket = None
        for within_E, after_E in zip(chunks, [*chunks[1:], None], strict=True):
            if ticket is None:
                ticket = self._bring(layer.index, ids_P, within_E)
            pairs = order_P[within_E[ids_P[order_P]]]
            slots_P = self._tables.slots_for(layer.index, ids_P[pairs])
            following = None
            if after_E is not None and self._pool.count > 1:  # one slot cannot load while it is read
                following = self._bring(layer.index, ids_P, after_E) - ticket
            self._join(layer.index, ticket)
            output_PD[pairs] = self._kernel.run_pairs(layer.experts, hidden_TD[pairs // top_k], slots_P)
            self._enter("policy", layer.index)
            ticket = following
        self._enter("compute", layer.index)
        return combine(output_PD, weights_TK, hidden_TD.dtype)

    def _chunks_of(self, layer: int, ids_P: Tensor) -> list[Tensor]:
        """bool [E] per chunk of half the slots, resident experts first."""
        experts = torch.unique(ids_P)
        experts = experts[(self._tables.slots_for(layer, experts) < 0).sort(stable=True).indices]
        none_E = torch.zeros(self._experts, dtype=torch.bool, device=ids_P.device)
        size = max(1, self._pool.count // 2)
        return [none_E.scatter(0, experts[start : start + size], True) for start in range(0, len(experts), size)]
