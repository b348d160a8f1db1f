"""Speculative execution: forecast ids and weights run in place of the router's own (rows B8 and B9).

B sequences, S tokens per sequence, T = B x S tokens, D hidden size, L MoE layers, E routed experts per layer,
K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from transformers import PreTrainedModel

from expertcast.data.taps import RouterCall, RouterTaps
from expertcast.predictors.base import Forecast, Predictor, RouterState
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.routing_rule import weights_over
from expertcast.predictors.view import MoEView
from expertcast.runtime.engine.refit import OnlineRefit
from expertcast.runtime.engine.traced import TracedForecasts


class Speculator:
    """Makes forecasts as layers run and says which routing a layer executes.

    Forecasts are chained: the state at layer l carries what layer l executed, so a forecast that was executed
    is what the next forecast is made from (trap 2 under row B19).

    Args:
        view: the model's MoE layers.
        predictor: bound to `view`; None: no forecasts.
        layers: layers that execute their forecast; the others follow their own router. A layer without a
            forecast (the first `ahead` ones) follows its own router whatever is said here.
        true_weights: execute the forecast's ids with the true router's weights over them.
        prefill: forecast (and execute) in steps of more than one token per sequence too.
        ahead: how many layers ahead forecasts are made.
    """

    def __init__(
        self,
        view: MoEView,
        predictor: Predictor | None,
        *,
        layers: Iterable[int] = (),
        true_weights: bool = False,
        prefill: bool = False,
        ahead: int = 1,
    ) -> None:
        if predictor is not None:
            predictor.check_ahead(ahead)
        self.view, self.predictor = view, predictor
        self.layers = frozenset(layers)
        outside = [layer for layer in self.layers if not 0 <= layer < len(view)]
        if outside:
            raise ExpertcastError(f"layers={outside} do not exist: the model has MoE layers 0..{len(view) - 1}")
        self.true_weights, self.prefill, self.ahead = true_weights, prefill, ahead
        self.previous_logits_TLE: Tensor | None = None
        """Set from outside to give `previous_token` its router logits in a forward over whole texts."""
        self._memory = _TokenMemory(len(view)) if predictor is not None and predictor.uses_previous_token else None
        self._traced = None if predictor is None else TracedForecasts(predictor)
        self._forecasts: dict[int, Forecast] = {}
        self.refit: OnlineRefit | None = None
        """Follows the text with the predictor's weights, where it is set before the first forward."""

    def prepare(self) -> None:
        """Get ready for decode steps of one text."""
        if self._traced is not None:
            self._traced.prepare(self.view, self.ahead)

    def start(self, fresh: bool) -> None:
        """A forward starts; `fresh`: with new texts."""
        self._forecasts.clear()
        if self._memory is not None:
            self._memory.start(fresh)
        if self.refit is not None:
            self.refit.start()

    def executed(self, call: RouterCall) -> tuple[Tensor, Tensor] | None:
        """(ids, weights) that the layer executes in place of its router's, or None: the router's own."""
        forecast = self._forecasts.get(call.layer)
        if forecast is None or call.layer not in self.layers:
            self._forecasts.pop(call.layer, None)
            return None
        weights_TK = forecast.topk_weights_TK
        if self.true_weights:
            weights_TK = weights_over(self.view[call.layer], call.logits_TE, forecast.topk_ids_TK)
        return forecast.topk_ids_TK, weights_TK.to(call.weights_TK.dtype)

    def forecast(self, call: RouterCall, executed: tuple[Tensor, Tensor] | None) -> Forecast | None:
        """The forecast made at this layer, if one is due; `executed` is what :meth:`executed` said."""
        if self.predictor is None or self._traced is None:
            return None
        if self._memory is not None:
            self._memory.see(call)
        own = self._forecasts.pop(call.layer, None)
        if self.refit is not None:
            self.refit.routed(call)
        if call.layer + self.ahead >= len(self.view) or (call.tokens > 1 and not self.prefill):
            return None
        ids_TK, weights_TK = (call.ids_TK, call.weights_TK) if executed is None else executed
        chained = own is not None and executed is not None and not self.true_weights
        state = RouterState(
            layer=call.layer, residual_TD=call.residual_TD, router_input_TD=call.router_input_TD,
            logits_TE=own.logits_TE if chained and own is not None else call.logits_TE,
            topk_ids_TK=ids_TK, topk_weights_TK=weights_TK, previous_logits_TLE=self._previous(call),
        )  # fmt: skip
        made = (self._traced if call.tokens == 1 else self.predictor).forecast(state, self.ahead)
        self._forecasts[made.layer] = made
        if self.refit is not None:
            self.refit.made(state)
        return made

    def _previous(self, call: RouterCall) -> Tensor | None:
        if self.previous_logits_TLE is not None:
            return self.previous_logits_TLE
        return self._memory.previous_BLE if self._memory is not None and call.tokens == 1 else None


class _TokenMemory:
    """Router logits of the last token of each sequence, all layers.

    Beam search reorders sequences between steps; a row may then hold another beam's logits.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._now_BLE: Tensor | None = None
        self.previous_BLE: Tensor | None = None

    def start(self, fresh: bool) -> None:
        self.previous_BLE = None if fresh else self._now_BLE
        self._now_BLE = None

    def see(self, call: RouterCall) -> None:
        last_BE = call.logits_TE.detach().reshape(call.sequences, call.tokens, -1)[:, -1]
        if self._now_BLE is None:
            self._now_BLE = last_BE.new_full((call.sequences, self._layers, last_BE.shape[-1]), float("nan"))
            if self.previous_BLE is not None and self.previous_BLE.shape != self._now_BLE.shape:
                self.previous_BLE = None
        self._now_BLE[:, call.layer] = last_BE


@contextmanager
def speculate(
    model: PreTrainedModel,
    view: MoEView,
    predictor: Predictor,
    *,
    layers: Sequence[int] | None = None,
    true_weights: bool = False,
    prefill: bool = True,
    ahead: int = 1,
    observe: Callable[[RouterCall, Tensor], object] | None = None,
) -> Iterator[Speculator]:
    """Run a model, resident or offloaded, with forecasts executed at its MoE layers; hooks only.

    Args:
        model: whose layers `view` holds.
        view, predictor, true_weights, ahead: as for :class:`Speculator`.
        layers: layers that execute their forecast; None for all that have one.
        prefill: speculate in steps of more than one token per sequence too (teacher-forced evaluation).
        observe: called after each router with the call and the ids [T, K] that the layer executes.

    Raises:
        ExpertcastError: `layers` or `ahead` outside what model and predictor have.
    """
    chosen = range(len(view)) if layers is None else layers
    speculator = Speculator(view, predictor, layers=chosen, true_weights=true_weights, prefill=prefill, ahead=ahead)

    def on_router(call: RouterCall) -> tuple[Tensor, Tensor] | None:
        executed = speculator.executed(call)
        speculator.forecast(call, executed)
        if observe is not None:
            observe(call, call.ids_TK if executed is None else executed[0])
        return executed

    taps = RouterTaps(model, view, on_router, speculator.start)
    try:
        yield speculator
    finally:
        taps.close()
