"""Speculative execution: forecast ids and weights run in place of the router's own.

B sequences, S tokens per sequence, T = B x S tokens, D hidden size, L MoE layers, E routed experts per layer,
K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, closing, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from expertcast.data.batch import RouterCall
from expertcast.predictors.base import Forecast, Predictor, RouterState
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import MoEView, RuleCheck, routes_by_logits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from expertcast.data.early import EarlyAttention
    from expertcast.data.traced import TracedForecasts


class TokenMemory:
    """Router logits of the last token of each sequence, all layers.

    Beam search reorders sequences between steps; a row may then hold another beam's logits.
    """

    def __init__(self, layers: int) -> None:
        self._now: list[Tensor | None] = [None] * layers
        """[B, E] by layer that this forward has reached."""
        self._before: list[Tensor | None] | None = None
        """The same of the forward before; None where it ran other sequences."""
        self._previous_BLE: Tensor | None = None

    def start(self, fresh: bool) -> None:
        """Start a forward; `fresh`: with new sequences."""
        self._before = None if fresh else self._now
        self._now, self._previous_BLE = [None] * len(self._now), None

    def see(self, call: RouterCall, logits_TE: Tensor) -> None:
        """Keep a layer's router logits [T, E]."""
        last_BE = logits_TE.detach()
        if call.tokens > 1:
            last_BE = last_BE.reshape(call.sequences, call.tokens, -1)[:, -1].clone()
        self._now[call.layer] = last_BE

    def previous(self, sequences: int) -> Tensor | None:
        """Return the logits [B, L, E] of each sequence's token before, NaN at layers that were not routed; None where a
        sequence has no such token."""
        if self._previous_BLE is None and self._before is not None:
            known = [each for each in self._before if each is not None]
            if not known or any(each.shape != known[0].shape for each in known):
                return None
            unknown_BE = torch.full_like(known[0], float("nan"))
            self._previous_BLE = torch.stack([unknown_BE if each is None else each for each in self._before], dim=1)
        found_BLE = self._previous_BLE
        return found_BLE if found_BLE is not None and len(found_BLE) == sequences else None


def early_attention_for(predictor: Predictor | None, model: PreTrainedModel, view: MoEView) -> EarlyAttention | None:
    """Return early attention over a model for a predictor that reads it; None for the others."""
    if predictor is None or not predictor.uses_early:
        return None
    from expertcast.data.early import EarlyAttention

    return EarlyAttention(model, view)


def check_layers(layers: Iterable[int], count: int) -> None:
    """Raise :class:`ExpertcastError` for layers that a model of so many MoE layers lacks."""
    outside = [layer for layer in layers if not 0 <= layer < count]
    if outside:
        raise ExpertcastError(f"layers={outside} do not exist: the model has MoE layers 0..{count - 1}")


class Speculator:
    """Makes forecasts as layers run and decides which routing a layer executes.

    Forecasts are chained: the state at layer l carries what layer l executed, so a forecast that was executed
    is what the next forecast is made from.

    Args:
        view: the model's MoE layers.
        predictor: bound to `view`; None: no forecasts.
        layers: layers that execute their forecast by the last rung; the others follow their own router. Layers
            without such a forecast (the first `ahead` ones) follow their own router in any case.
        prefill: forecast (and execute) in steps of more than one token per sequence too.
        ahead: how many layers ahead forecasts are made.
        early: runs the model's blocks early, for a predictor that reads early attention.

    Raises:
        ExpertcastError: layers that do not exist, or distances that the predictor was not made for.
    """

    def __init__(
        self,
        view: MoEView,
        predictor: Predictor | None,
        *,
        layers: Iterable[int] = (),
        prefill: bool = False,
        ahead: int = 1,
        early: EarlyAttention | None = None,
    ) -> None:
        self._memory = TokenMemory(len(view)) if predictor is not None and predictor.uses_previous_token else None
        if predictor is not None:
            predictor.check_ahead(ahead)
            assert early is not None or not predictor.uses_early, f"{predictor.name} reads early attention"
        self.view, self.layers = view, frozenset(layers)
        self.predictor = predictor = predictor.executed() if predictor is not None and self.layers else predictor
        check_layers(self.layers, len(view))
        self.prefill, self.ahead = prefill, ahead
        self.previous_logits_TLE: Tensor | None = None
        """Router logits for `previous_token` in a forward over whole sequences; set from outside."""
        self.rungs: list[TracedForecasts] = []
        """Ways to forecast; the last is the predictor itself, whose forecasts are executed."""
        if predictor is not None:
            from expertcast.data.traced import TracedForecasts

            self.rungs += map(TracedForecasts, predictor.rungs().values())
            self.rungs[-1].folded = bool(self.layers)
        self._forecasts: dict[int, Forecast] = {}
        self.early = early
        self._state: RouterState | None = None
        """State of the last forecast."""
        self._waiting: dict[int, tuple[RouterState, Tensor]] = {}
        """By source layer, forecasts of whole sequences that wait for the next block's attention."""
        self._check = RuleCheck(view)
        if predictor is None:
            self._check.unseen.clear()
        else:
            self._check.try_out()

    def hint_only(self, count: int) -> None:
        """Let :meth:`hint` return the first `count` ids of each token in place of a rung's forecasts that no layer
        executes, where routers take the experts with the highest logits."""
        if self.rungs and not self._check.wrong and routes_by_logits(self.view):
            for rung in self.rungs[:-1] if self.layers else self.rungs:
                rung.folded, rung.hinted = True, count

    def prepare(self) -> None:
        """Prepare decode steps: trace programs."""
        for rung in self.rungs:
            rung.prepare(self.view, self.ahead, self._check.wrong)

    def following(self) -> AbstractContextManager[object]:
        """Follow the model's forwards in the context for early attention."""
        if self.early is None:
            return nullcontext()
        self.early.attach()
        return closing(self.early)

    def start(self, fresh: bool, rung: int | None = -1) -> None:
        """Start a forward.

        Args:
            fresh: with new sequences.
            rung: number in `rungs` of the expected one; None: no forecast is expected.
        """
        self._forecasts.clear()
        self._waiting.clear()
        self._state = None
        if self.early is not None:
            self.early.follow(bool(self.layers) or (rung is not None and self.rungs[rung].predictor.uses_early))
        if self._memory is not None:
            self._memory.start(fresh)

    def executed(self, call: RouterCall) -> tuple[Tensor, Tensor] | None:
        """Return (ids, weights) that the layer executes in place of its router's; None: the router's own."""
        if self._check.unseen:
            if call.layer in self._check.unseen:
                self._check.see(call.layer, call.router_input_TD)
            for layer in self._check.wrong:  # routers that do not follow their routing rule
                self._forecasts.pop(layer, None)
        self._make_waiting(call.layer)
        forecast = self._forecasts.get(call.layer)
        if forecast is None or call.layer not in self.layers:
            self._forecasts.pop(call.layer, None)
            return None
        return forecast.topk_ids_TK, forecast.topk_weights_TK.to(call.weights_TK.dtype)

    def executed_logits(self, call: RouterCall, executed: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return the logits [T, E] of the routing that a layer executes, its forecast's or its router's.

        Arguments are those of :meth:`forecast`.
        """
        own = self._forecasts.get(call.layer)
        return call.logits_TE if own is None or executed is None else own.logits_TE

    def due(self, call: RouterCall, executed: tuple[Tensor, Tensor] | None) -> int | None:
        """Keep a router's results for later forecasts; return the layer for which a forecast is due, if any.

        To be called with a predictor only.

        Args:
            call: of the layer.
            executed: result of :meth:`executed`.
        """
        logits_TE = self.executed_logits(call, executed)
        self._forecasts.pop(call.layer, None)
        if self._memory is not None:
            self._memory.see(call, logits_TE)
        target = call.layer + self.ahead
        if target >= len(self.view.layers) or target in self._check.wrong or (call.tokens > 1 and not self.prefill):
            return None
        ids_TK, weights_TK = (call.ids_TK, call.weights_TK) if executed is None else executed
        self._state = RouterState(
            layer=call.layer, residual_TD=call.residual_TD, router_input_TD=call.router_input_TD, logits_TE=logits_TE,
            topk_ids_TK=ids_TK, topk_weights_TK=weights_TK,
        )  # fmt: skip
        return target

    def forecast(self, call: RouterCall, rung: int = -1) -> Forecast | None:
        """Return the forecast that is :meth:`due` at a layer; None: over whole sequences it waits for the next block's
        attention.

        Args:
            call: of the layer.
            rung: number in `rungs`.
        """
        state, traced = self._known(call, rung)
        wants_early = traced.predictor.wants_early(call.layer, self.ahead) and state.early_TD is None
        if wants_early and not self._look_early(call, state, traced):
            return None
        made = (traced if call.tokens == 1 else traced.predictor).forecast(state, self.ahead)
        if traced is self.rungs[-1]:
            self._forecasts[made.layer] = made
        return made

    def _known(self, call: RouterCall, rung: int) -> tuple[RouterState, TracedForecasts]:
        """Return the state to forecast from, and a rung."""
        state, traced = self._state, self.rungs[rung]
        assert state is not None, "a forecast that is not due"
        if traced.predictor.uses_previous_token:
            state.previous_logits_TLE = self.previous_logits_TLE
            if self.previous_logits_TLE is None and self._memory is not None and call.tokens == 1:
                state.previous_logits_TLE = self._memory.previous(call.sequences)
        return state, traced

    @torch.no_grad()
    def hint(self, call: RouterCall, rung: int = -1) -> Tensor | None:
        """Return ids [T, N] in place of the forecast that is :meth:`due`, each token's likeliest first; None: only the
        forecast has them, or the layer executes it.

        Arguments are those of :meth:`forecast`.
        """
        state, traced = self._known(call, rung)
        executed = traced is self.rungs[-1] and call.layer + self.ahead in self.layers
        if executed or traced.hinted is None or call.tokens > 1:
            return None
        if traced.predictor.wants_early(call.layer, self.ahead):
            assert self.early is not None
            standing_TD = traced.stand_in(state)
            found_TD = self.early.attend(call.layer + 1, standing_TD)
            state.early_TD = standing_TD if found_TD is None else found_TD
        return traced.hint(state, self.ahead)

    def _look_early(self, call: RouterCall, state: RouterState, traced: TracedForecasts) -> bool:
        """Fill in early attention; False: over whole sequences the next block's own attention runs first."""
        assert self.early is not None
        if call.tokens > 1:
            self._waiting[call.layer] = state, traced.predictor.stand_in(state)
            return False
        standing_TD = traced.stand_in(state)
        state.early_TD = _residual(self.early.attend(call.layer + 1, standing_TD), standing_TD, state)
        return True

    def _make_waiting(self, layer: int) -> None:
        """Make the forecasts that waited for the attention of this layer, whose router has run."""
        waiting = self._waiting.pop(layer - 1, None)
        if waiting is None:
            return
        assert self.predictor is not None
        assert self.early is not None
        state, standing_TD = waiting
        state.early_TD = _residual(self.early.attend_whole(layer, standing_TD), standing_TD, state)
        made = self.predictor.forecast(state, self.ahead)
        self._forecasts[made.layer] = made


def _residual(found_TD: Tensor | None, standing_TD: Tensor, state: RouterState) -> Tensor:
    """Return early attention's result, or the stand-in where it could not run, in the dtype of the residual stream."""
    return (standing_TD if found_TD is None else found_TD).to(state.residual_TD.dtype)
