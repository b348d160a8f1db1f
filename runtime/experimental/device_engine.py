"""An offloaded forward pass without host decisions: table updates, copies and kernels run one after another on the
device.

It drives :class:`expertcast.runtime.experimental.kernel_link.KernelLink`. If a step's T x K ids fit the slots, whatever
their values, the host reads nothing from the device, so the step can be captured in a CUDA graph. For other steps the
host counts the distinct experts, and runs a step with more of them than slots in chunks.

T tokens, D hidden size, E routed experts per layer, K experts per token, P token-expert pairs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from expertcast.data.batch import RouterCall, capturing
from expertcast.predictors.base import Forecast
from expertcast.predictors.view import MoELayer
from expertcast.runtime.engine.engine import Engine, EngineParts, row_order
from expertcast.runtime.experimental.kernel_link import DeviceStatistics, KernelLink


class DeviceEngine(Engine):
    """Engine for a kernel link: tables on the device apply the rules of the host's expert cache with LRU eviction."""

    def __init__(self, parts: EngineParts) -> None:
        super().__init__(parts)
        link = parts.link
        assert isinstance(link, KernelLink), f"link {link.name!r} has no tables on the device"
        enter = self._enter
        self._enter = lambda state, layer: None if capturing() else enter(state, layer)  # a capture takes no time
        self.stats = DeviceStatistics(link, parts.pool.layout.block_bytes)
        self._link, self._tables = link, link.residency
        self._prefetch_policy, self._keep = parts.policies.prefetch, parts.keep
        self._ids_TK: Tensor | None = None
        """Router ids for which the current layer was prepared."""
        self._layer = -1
        self._whole = False
        """Whether the current layer runs in one piece. Stored because the answer may need a host read."""
        self._calls = 0
        """Link calls that the current layer waits for."""

    def limit(self, layer: int) -> int:
        return self._pool.count

    def held(self, layer: int) -> list[int]:
        slots_E = self._tables.slots_for(layer, torch.arange(self._experts, device=self._pool.device))
        return (slots_E >= 0).nonzero().reshape(-1).tolist()

    def on_start(self, fresh: bool, token_BS: Tensor | None = None) -> None:
        self._link.follow()
        if self._inconsistent:  # otherwise the tables are correct, even after an aborted forward pass
            self._tables.clear()
            self._inconsistent = False
        self._ids_TK = None
        self._calls = 0
        self._speculator.start(fresh)

    def on_router(self, call: RouterCall) -> tuple[Tensor, Tensor] | None:
        self._enter("policy", call.layer)
        executed = self._speculator.executed(call)
        self._prepare(call.layer, call.ids_TK if executed is None else executed[0])
        self._enter("forecast", call.layer)
        due = self._speculator.due(call, executed)
        forecast = None if due is None else self._speculator.forecast(call)
        self._enter("policy", call.layer)
        if forecast is not None:
            self._prefetch(forecast, running=self._tables.width(call.ids_TK))
        self._enter("compute", call.layer)
        return executed

    def run(self, layer: MoELayer, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        self._enter("policy", layer.index)
        self._check_untouched(layer)
        if ids_TK is not self._ids_TK or layer.index != self._layer:  # another hook changed the routing after ours
            self._prepare(layer.index, ids_TK)
        if not self._whole:
            with self._link.reserved:  # the next chunk is copied while this one is computed
                chunks = self._chunks(layer.index, ids_TK.reshape(-1))
                output_TD = self._run_chunks(layer, hidden_TD, weights_TK, chunks)
        else:
            slots_TK = self._tables.slots_for(layer.index, ids_TK)
            self._join(layer.index, self._calls)
            with self._link.reserved_if_copying():
                output_TD = self._kernel.run(layer.experts, hidden_TD, slots_TK, weights_TK, ids_TK)
        self._enter("policy", layer.index)
        self._tables.finish(layer.index, keep=self._keep)
        self._ids_TK = None
        self._enter("compute", layer.index + 1)
        return output_TD

    def _fits(self, ids_TK: Tensor) -> bool:
        if self._tables.width(ids_TK) <= self._pool.count:
            return True
        return not capturing() and len(torch.unique(ids_TK)) <= self._pool.count

    def _prepare(self, layer: int, ids_TK: Tensor) -> None:
        """Start the copies of a layer's misses. A step in chunks starts them chunk by chunk."""
        self._layer, self._ids_TK, self._whole = layer, ids_TK, self._fits(ids_TK)
        if self._whole:
            self._calls = self._request(layer, ids_TK)

    def _request(self, layer: int, ids_TK: Tensor, within_E: Tensor | None = None) -> int:
        """Start the copies of misses; return the number of link calls to wait for."""
        self._inconsistent = True
        self._link.move(self._tables.request(layer, ids_TK, within_E), layer)
        self._inconsistent = False
        return self._link.calls_in_flight()

    def _prefetch(self, forecast: Forecast, running: int) -> None:
        if self._pool.count <= running:
            return
        self._inconsistent = True
        ids_N = self._prefetch_policy.device_ids(forecast)
        assert ids_N is not None, "offload() accepts only policies that select on the device"
        moves = self._tables.prefetch(forecast.layer, ids_N, running)
        self._link.move(moves, forecast.layer, urgent=False)
        self._inconsistent = False

    def _join(self, layer: int, calls: int) -> None:
        self._enter("wait", layer)
        self._link.join(calls)
        self._link.check()
        self._enter("compute", layer)

    def _chunks(self, layer: int, ids_P: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each chunk's pairs and slots after its copies have arrived; the next chunk's copies run meanwhile."""
        order_P = row_order(ids_P)
        chunks = self._chunks_of(layer, ids_P)
        calls = None
        for within_E, after_E in zip(chunks, [*chunks[1:], None], strict=True):
            if calls is None:
                calls = self._request(layer, ids_P, within_E)
            pairs = order_P[within_E[ids_P[order_P]]]
            slots = self._tables.slots_for(layer, ids_P[pairs])
            following = None
            if after_E is not None and self._pool.count > 1:  # one slot cannot load while it is read
                following = self._request(layer, ids_P, after_E) - calls
            self._join(layer, calls)
            yield pairs, slots
            calls = following
        self._enter("compute", layer)

    def _chunks_of(self, layer: int, ids_P: Tensor) -> list[Tensor]:
        """Return the chunks as bool [E] masks of half the slots each, resident experts first."""
        experts = torch.unique(ids_P)
        experts = experts[(self._tables.slots_for(layer, experts) < 0).sort(stable=True).indices]
        none_E = torch.zeros(self._experts, dtype=torch.bool, device=ids_P.device)
        size = max(1, self._pool.count // 2)
        return [none_E.scatter(0, experts[start : start + size], True) for start in range(0, len(experts), size)]
