"""One offloaded forward, layer by layer: request, forecast, prefetch, wait, compute, release.

T tokens, D hidden size, E routed experts per layer, K experts per token. An expert's key is layer * E + expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from expertcast.predictors.base import Forecast
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.view import MoELayer
from expertcast.runtime.engine.flow import LayerFlow
from expertcast.runtime.engine.kernels import SlotKernel, combine, row_order
from expertcast.runtime.engine.speculation import Speculator
from expertcast.runtime.engine.taps import RouterCall
from expertcast.runtime.links.readback import Pending, Readback
from expertcast.runtime.links.upload import Upload
from expertcast.runtime.recording.observer import Observer, State

EXPERTS_NAME = "expertcast"
"""Name of our experts function in transformers' registry."""

_RUNNING: WeakKeyDictionary[nn.Module, tuple[ref[Engine], int]] = WeakKeyDictionary()
"""Experts modules that are offloaded now, with their layer. The engine, which holds the model, lives in its hooks."""


_FEW_IDS = 512
"""Up to so many ids a list serves better than a table of all experts."""


@dataclass(slots=True)
class _Plan:
    """What one run of a layer needs."""

    layer: int
    ids_TK: Tensor
    keys: list[int] | None
    """Key of each of the T x K ids, when they are few."""
    chunks: list[list[int]]
    """Distinct keys, chunk by chunk; one chunk when all fit the slots."""
    precision: dict[int, str] | None
    """Of the keys that need not come in full."""


class Engine:
    """Drives flow and kernel from the router hook (:meth:`on_router`) and the experts function (:meth:`run`)."""

    def __init__(
        self,
        flow: LayerFlow,
        speculator: Speculator,
        kernel: SlotKernel,
        observer: Observer,
    ) -> None:
        self._flow = flow
        self._residency = residency = flow.residency
        self._speculator = speculator
        self._kernel = kernel
        self._observer = residency.observer
        self._pool = residency.pool
        self._experts = speculator.view.shape.experts
        self._last = len(speculator.view) - 1
        self._readback = Readback(self._pool.device)
        self._upload = Upload(self._pool.device)
        self._prefetch_late = self._pool.device.type != "cpu"
        """Whether kernels run beside the host: then a forecast is read back after the layer's kernels are launched."""
        self._halfway = False
        """A call of ours began and, as far as is known, did not end: books and copies may not agree."""
        self._plan: _Plan | None = None
        self._forecast: tuple[Forecast, Pending, Pending] | None = None
        """The forecast made at this layer, whose ids and weights are on their way to the host."""
        self._known_ids: dict[int, list[int]] = {}
        """Ids (flat) of forecasts by target layer, as far as the host has them."""
        self._complete = False
        """The last forward ran to its last layer."""
        self._pointers = {name: view.data_ptr() for name, view in self._pool.views.items()}

    def attach(self, layer: MoELayer) -> None:
        """Put the slot views in the place of a layer's parameters."""
        for name, view in self._pool.views.items():
            layer.experts._parameters[name] = nn.Parameter(view, requires_grad=False)
        _RUNNING[layer.experts] = (ref(self), layer.index)

    def layer(self, index: int) -> MoELayer:
        return self._speculator.view[index]

    @staticmethod
    def detach(layer: MoELayer) -> None:
        _RUNNING.pop(layer.experts, None)
        layer.experts.__dict__["num_experts"] = layer.num_experts  # a kernel that was interrupted left that of slots

    @staticmethod
    def is_attached(model: nn.Module) -> bool:
        """Whether any experts module of the model is offloaded."""
        return any(module in _RUNNING for module in model.modules())

    def on_start(self, fresh: bool) -> None:
        """A forward starts; whatever an earlier one left behind when it was cut short is cleared."""
        self._residency.link.follow()
        self._plan = None
        self._forecast = None
        self._known_ids.clear()
        halfway, self._halfway = self._halfway, True
        complete, self._complete = self._complete, False
        if halfway:
            self._residency.reset()
        elif fresh or not complete:
            self._residency.abandon()
        self._flow.start_pass(fresh)
        self._halfway = False
        self._speculator.start(fresh)

    def on_router(self, call: RouterCall) -> tuple[Tensor, Tensor] | None:
        """Misses of this layer go out first; the forecast is made while they are under way."""
        self._halfway = True
        self._enter("policy", call.layer)
        executed = forecast_executed = self._speculator.executed(call)
        precision = None
        self._observer.routed(call.layer, call.residual_TD, call.logits_TE)
        if self._flow.reads_logits:
            self._flow.see(call.layer, call.residual_TD, call.logits_TE, call.sequences)
        if self._flow.decides:
            executed, precision = self._decide(call, executed)
        ids_TK = call.ids_TK if executed is None else executed[0]
        self._begin(call.layer, ids_TK, executed is not None and executed is forecast_executed, precision)
        self._enter("forecast", call.layer)
        forecast = self._speculator.forecast(call, executed)
        self._enter("policy", call.layer)
        if forecast is not None:
            start = self._readback.start
            self._forecast = forecast, start(forecast.topk_ids_TK), start(forecast.topk_weights_TK)
        if not self._prefetch_late:
            self._prefetch(call.layer)
        self._enter("compute", call.layer)
        self._halfway = False
        return executed

    def _decide(
        self, call: RouterCall, executed: tuple[Tensor, Tensor] | None
    ) -> tuple[tuple[Tensor, Tensor] | None, dict[int, str] | None]:
        """What routing and miss policies make of what would be executed, and the precision it comes in."""
        ids_TK, weights_TK = (call.ids_TK, call.weights_TK) if executed is None else executed
        decision = self._flow.decide(call.layer, call.logits_TE, ids_TK, weights_TK, routed=executed is None)
        if decision is None:
            return executed, None
        return (decision.ids_TK, decision.weights_TK), decision.precision

    def _enter(self, state: State, layer: int) -> None:
        self._observer.enter(state, layer)

    def _prefetch(self, layer: int) -> None:
        if self._forecast is not None:
            forecast, ids, weights = self._forecast
            self._forecast = None
            ids_T = ids.tolist()
            self._known_ids[forecast.layer] = [expert for row in ids_T for expert in row]
            self._flow.hint(forecast, ids_T, weights.tolist())
        self._flow.finish(layer)

    def run(self, layer: MoELayer, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The layer's experts over their slots."""
        self._halfway = True
        self._enter("policy", layer.index)
        self._check_untouched(layer)
        plan = self._plan
        if plan is None or plan.layer != layer.index or not _same(plan.ids_TK, ids_TK):
            plan = self._begin(layer.index, ids_TK, False)
        self._plan = None
        self._observer.ran(layer.index, len(plan.chunks))
        run = self._run_whole if len(plan.chunks) == 1 else self._run_chunks
        output_TD = run(layer, plan, hidden_TD, ids_TK, weights_TK)
        if self._prefetch_late:
            self._prefetch(layer.index)
        self._complete = layer.index == self._last
        self._enter("compute", layer.index + 1)
        self._halfway = False
        return output_TD

    def _begin(self, layer: int, ids_TK: Tensor, forecast: bool, precision: dict[int, str] | None = None) -> _Plan:
        """Request what a layer executes; `forecast`: these are the ids of the layer's forecast."""
        first = layer * self._experts
        flat: list[int] | None = self._known_ids.pop(layer, None)
        if not forecast or flat is None:
            few = ids_TK.numel() <= _FEW_IDS
            flat = self._readback.start(ids_TK.reshape(-1)).tolist() if few else None
        if flat is not None and len(flat) <= _FEW_IDS:
            all_keys = [first + expert for expert in flat]
            distinct = list(dict.fromkeys(all_keys))
        else:
            all_keys = None
            distinct = [first + expert for expert in torch.unique(ids_TK).tolist()]
        self._plan = _Plan(layer, ids_TK, all_keys, self._flow.begin(layer, distinct, precision), precision)
        return self._plan

    def _run_whole(self, layer: MoELayer, plan: _Plan, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        (keys,) = plan.chunks
        slots = None
        if plan.keys is None:
            slots_TK = self._slot_table(layer.index, keys)[ids_TK]
        else:
            slot_of = self._pool.slots
            slots = [slot_of[key] for key in plan.keys]
            slots_TK = self._upload.send(slots).view(ids_TK.shape)
        self._wait(layer.index, keys)
        output_TD = self._kernel.run(layer.experts, hidden_TD, slots_TK, weights_TK, ids_TK, slots)
        self._enter("policy", layer.index)
        self._residency.release(keys)
        return output_TD

    def _run_chunks(
        self, layer: MoELayer, plan: _Plan, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor
    ) -> Tensor:
        """The same products in several kernel calls, one reduction at the end."""
        top_k = ids_TK.shape[1]
        ids_P, order_P = ids_TK.reshape(-1), row_order(ids_TK)
        output_PD = hidden_TD.new_empty(ids_P.shape[0], hidden_TD.shape[1])
        for index, keys in enumerate(plan.chunks):
            if index + 1 < len(plan.chunks):
                self._residency.request(plan.chunks[index + 1], plan.precision)
            slots_P = self._slot_table(layer.index, keys)[ids_P]
            pairs = order_P[slots_P[order_P] >= 0]
            self._wait(layer.index, keys)
            output_PD[pairs] = self._kernel.run_pairs(layer.experts, hidden_TD[pairs // top_k], slots_P[pairs])
            self._enter("policy", layer.index)
            self._residency.release(keys)
        return combine(output_PD, weights_TK, hidden_TD.dtype)

    def _wait(self, layer: int, keys: list[int]) -> None:
        self._enter("wait", layer)
        self._residency.wait(keys)
        self._enter("compute", layer)

    def _slot_table(self, layer: int, keys: list[int]) -> Tensor:
        """[E] slot of each expert, -1 where it has none in this chunk."""
        table = [-1] * self._experts
        first = layer * self._experts
        for key in keys:
            table[key - first] = self._pool.slots[key]
        return self._upload.send(table)

    def _check_untouched(self, layer: MoELayer) -> None:
        for name, pointer in self._pointers.items():
            if layer.experts._parameters[name].data_ptr() != pointer:  # type: ignore[union-attr]
                raise ExpertcastError(
                    f"{layer.experts_name}.{name} was changed or moved while the model is offloaded: close the offload "
                    "first, then move or change the model"
                )


def _same(ids_TK: Tensor, other_TK: Tensor) -> bool:
    return ids_TK is other_TK or torch.equal(ids_TK, other_TK)


# traced, it would do its books once and for all: a compiled model is compiled around it
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _offloaded_experts(experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    found = _RUNNING.get(experts)
    engine = None if found is None else found[0]()
    if found is None or engine is None:
        raise ExpertcastError(
            f"experts implementation {EXPERTS_NAME!r} runs only inside expertcast.offload(model): set another one, "
            "such as 'grouped_mm' (or does this model share its config with an offloaded one?)"
        )
    with torch.no_grad():
        output_TD = engine.run(engine.layer(found[1]), hidden_states, top_k_index, top_k_weights)
    if torch.is_grad_enabled() and hidden_states.requires_grad:
        refused: Tensor = _NoBackward.apply(hidden_states, output_TD)  # type: ignore[no-untyped-call]
        return refused
    return output_TD


class _NoBackward(torch.autograd.Function):
    """A backward would find other experts in the slots: refuse it."""

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, output_TD: Tensor) -> Tensor:
        del ctx, hidden_TD
        return output_TD.view_as(output_TD)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ExpertcastError("an offloaded model has no gradients: close the offload before training the model")


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _offloaded_experts)
