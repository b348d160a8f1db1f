"""Forecasts that follow the text: their ridge part refitted while the model runs, and used only where that is better.

What a router has scored is compared with what was forecast for it, and recursive least squares
(:mod:`expertcast.runtime.engine.least_squares`) say what the forecast's ridge part lacks. The targets are the routers'
own scores, also at layers that execute their forecast: what those make of the text later on is part of what is learned,
but a forecast is never its own target.

Layers are collected in blocks of tokens, and a full block waits for its turn (:mod:`.refit_layer` learns from it). Each
token gets `budget_ms`; what a token has not used is not saved, what it overdraws (by one block's work at most) the next
ones pay back, collecting nothing meanwhile.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch

from expertcast.data.router_call import RouterCall
from expertcast.predictors.base import Predictor, RouterState
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.plain import Json
from expertcast.runtime.engine.refit_layer import Example, LayerRefit
from expertcast.runtime.engine.refit_part import ridge_part


class OnlineRefit:
    """Refits the forecasts of one run.

    Args:
        predictor: `linear`, `estimator`, or a hybrid of them, bound; its weights are changed until :meth:`restore`.
        ahead: layers between a forecast and its target.
        budget_ms: milliseconds that a token may take for it on average.
        clock: seconds.

    Raises:
        ExpertcastError: the predictor has no ridge part.
    """

    def __init__(
        self, predictor: Predictor, ahead: int, budget_ms: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._ahead, self._budget_s = ahead, budget_ms / 1e3
        self.clock = clock
        """Says what the time is."""
        self._layers: dict[int, LayerRefit] = {}
        """By target layer."""
        for layer in range(len(predictor.view) - ahead):
            part = ridge_part(predictor, layer, ahead)
            if part is not None:
                self._layers[layer + ahead] = LayerRefit(part, predictor.view[layer + ahead])
        if not self._layers:
            raise ExpertcastError(
                f"refit changes the ridge part of linear and estimator, predictor {predictor.name!r} has none: leave "
                "refit out"
            )
        self._made: dict[int, RouterState] = {}
        self._due: deque[LayerRefit] = deque()
        self._credit_s = 0.0
        self._collects = False
        self.seconds = 0.0
        """Spent so far."""
        self.longest_s = 0.0
        """The longest that one token's layer had to wait for it."""

    def start(self) -> None:
        """A forward starts."""
        self._made.clear()
        self._credit_s = min(self._budget_s, self._credit_s + self._budget_s)
        self._collects = self._credit_s > 0

    def made(self, state: RouterState) -> None:
        """A forecast was made from this state."""
        layer = self._layers.get(state.layer + self._ahead)
        if self._collects and layer is not None and layer.takes(state):
            begin = self.clock()
            self._made[state.layer + self._ahead] = _kept(state)
            self._spent(begin)

    def routed(self, call: RouterCall) -> None:
        """A router has run."""
        state = self._made.pop(call.layer, None)
        if state is None or len(state.residual_TD) != len(call.logits_TE):
            return
        begin = self.clock()
        layer = self._layers[call.layer]
        layer.collect(Example(state, call.logits_TE.clone(), call.ids_TK.clone()))
        if layer.full:
            self._due.append(layer)
        self._spent(begin)

    def work(self) -> None:
        """Learn from a block that waits, if there is time; called while the layer's copies are under way."""
        if self._due and self._credit_s > 0:
            begin = self.clock()
            layer = self._due[0]
            with torch.inference_mode(False), torch.no_grad():
                if layer.work():
                    self._due.popleft()
            self._spent(begin)

    def _spent(self, begin: float) -> None:
        seconds = self.clock() - begin
        self._credit_s -= seconds
        self.seconds += seconds
        self.longest_s = max(self.longest_s, seconds)

    def restore(self) -> None:
        """The predictor's weights as they were, bit for bit."""
        with torch.inference_mode(False), torch.no_grad():
            for layer in self._layers.values():
                layer.part.apply(None)

    def as_dict(self) -> Json:
        """`refit`, with `seconds` and `longest_ms`; by target layer, `tokens` learned from, whether it is `used`, and
        `gain`: the recall of the refitted map less that of the frozen one, on tokens that neither had seen."""
        layers = {target: layer.as_dict() for target, layer in self._layers.items()}
        return {"refit": {"seconds": self.seconds, "longest_ms": self.longest_s * 1e3, "layers": layers}}


def _kept(state: RouterState) -> RouterState:
    """A copy, without the scores: nothing here reads them. The previous token's are written once, and shared."""
    return RouterState(
        layer=state.layer, residual_TD=state.residual_TD.clone(), router_input_TD=state.router_input_TD.clone(),
        logits_TE=state.logits_TE[:, :0], topk_ids_TK=state.topk_ids_TK.clone(),
        topk_weights_TK=state.topk_weights_TK.clone(), previous_logits_TLE=state.previous_logits_TLE,
        early_TD=None if state.early_TD is None else state.early_TD.clone(),
    )  # fmt: skip
