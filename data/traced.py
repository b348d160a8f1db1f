"""Forecasts of decode steps as traced programs: the same tensor operations without Python between them.

A forecast of one token is some fifty operations on a few hundred numbers: two thirds of its time is Python's. Each
trace is of the predictor itself, for one layer and one token, and used only if it gives the predictor's own bits. For
several tokens the predictor itself runs: traces of each batch size would take 0.1 s each while serving, and memory.
The forecast of one token runs without oneDNN, traced or not: in bf16 it may differ in rounding from one with it.

T tokens, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from expertcast.data.machine import without_onednn
from expertcast.data.tracing import Program, Tensors, traced
from expertcast.predictors.base import Forecast, Predictor, RouterState
from expertcast.predictors.folded import Hints, hints
from expertcast.predictors.view import MoEView

_CHECKED_CALLS = 3
"""Calls, the traced one included, in which a trace is compared with its predictor."""

TENSORS = (
    "residual_TD", "router_input_TD", "logits_TE", "topk_ids_TK", "topk_weights_TK", "previous_logits_TLE", "early_TD"
)  # fmt: skip
"""Tensors of a state, in the order of a trace's inputs; the last two may be missing."""

_KNOWN, _LAST = TENSORS[:5], TENSORS[5:]
_INPUTS_OF = {
    (previous, early): attrgetter(
        *_KNOWN, *[name for name, there in zip(_LAST, (previous, early), strict=True) if there]
    )
    for previous in (True, False)
    for early in (True, False)
}
"""Inputs of a trace, by the presence of the last two."""
_FEW = 16
"""Tokens of a batch up to which hints are made: beyond, rows of experts cost more memory than the forecast."""
_Function = Callable[[RouterState], Tensors]


@dataclass(slots=True)
class _Program:
    run: Program | None
    """The trace; None: the predictor itself runs."""
    checks_left: int = _CHECKED_CALLS


class TracedForecasts:
    """Forecasts of a predictor, bit for bit, by traces of single tokens after the first calls.

    Predictors with `traceable = False`, and those whose trace differs in the first calls, run themselves.
    """

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self.folded = False
        """Whether few tokens' forecasts use :mod:`expertcast.predictors.folded` where they can, up to rounding."""
        self.hinted: int | None = None
        """Number of ids that :meth:`hint` gives; None: no hints, every forecast is bit for bit the predictor's."""
        self._hints: dict[tuple[int, int], Hints | None] = {}
        self._programs: dict[tuple[object, ...], _Program] = {}

    @torch.no_grad()
    def prepare(self, view: MoEView, ahead: int, without: Container[int] = ()) -> None:
        """Trace and check the forecasts of one sequence's decode steps in advance, apart from target layers `without`
        forecasts."""
        if not self.predictor.traceable:
            return
        generator = torch.Generator().manual_seed(0)  # its own: sampled generation must not change
        for layer in (layer for layer in range(len(view) - ahead) if layer + ahead not in without):
            for _ in range(_CHECKED_CALLS):
                state = _random_state(view, layer, self.predictor.uses_previous_token, generator)
                if self.predictor.wants_early(layer, ahead):
                    state.early_TD = self.stand_in(state).to(state.residual_TD.dtype)
                if self.hint(state, ahead) is None:
                    self.forecast(state, ahead)

    def forecast(self, state: RouterState, ahead: int) -> Forecast:
        """Return `predictor.forecast(state, ahead)`."""
        few = self.folded and len(state.residual_TD) <= _FEW
        own, target = self._maps(state.layer, ahead) if few else None, self.predictor.view[state.layer + ahead]

        def outputs(given: RouterState) -> Tensors:
            if own is not None:
                logits_TE = own.logits(given)
                return logits_TE, *target.route(logits_TE)
            made = self.predictor.forecast(given, ahead)
            return made.logits_TE, made.topk_ids_TK, made.topk_weights_TK

        logits_TE, ids_TK, weights_TK = self._run(ahead, outputs, state, state.layer + ahead)
        return Forecast(
            layer=state.layer + ahead, logits_TE=logits_TE, topk_ids_TK=ids_TK, topk_weights_TK=weights_TK,
            log_odds=self.predictor.log_odds(state.layer, ahead),
        )  # fmt: skip

    def hint(self, state: RouterState, ahead: int) -> Tensor | None:
        """Return the ids [T, `hinted`] that a forecast would name, each token's likeliest first, by fewer operations
        and up to rounding; None where only the forecast has them."""
        count, layer = self.hinted, state.layer
        own = None if count is None or len(state.residual_TD) > _FEW else self._maps(layer, ahead)
        if own is None or count is None:
            return None
        return self._run(("hint", ahead), lambda given: (own.ids(given, count),), state, layer + ahead)[0]

    def _maps(self, layer: int, ahead: int) -> Hints | None:
        if (layer, ahead) not in self._hints:
            self._hints[layer, ahead] = hints(self.predictor, layer, ahead)
        return self._hints[layer, ahead]

    def stand_in(self, state: RouterState) -> Tensor:
        """Return `predictor.stand_in(state)`."""
        return self._run("stand_in", lambda given: (self.predictor.stand_in(given),), state, state.layer)[0]

    def _run(self, kind: object, function: _Function, state: RouterState, frozen: int) -> Tensors:
        """Return the function's tensors, by its trace where the trace gives the same bits.

        Args:
            kind: name of the function.
            function: of a state.
            state: of any number of tokens.
            frozen: layer whose norm and router the function may run.
        """
        there = state.previous_logits_TLE is not None, state.early_TD is not None
        if len(state.residual_TD) > 1:
            with torch.no_grad():
                return function(state)
        key = kind, state.layer, there
        inputs = _INPUTS_OF[there](state)
        program = self._programs.get(key)
        if program is not None and not program.checks_left and program.run is not None:
            return program.run(*inputs)
        with torch.no_grad():
            if program is None:
                made = self._trace(function, state, frozen) if self.predictor.traceable else None
                program = self._programs[key] = _Program(made)
            if program.run is None:
                return without_onednn(function, state)
            own = without_onednn(function, state)
            program.checks_left -= 1
            if not all(map(torch.equal, own, program.run(*inputs))):
                program.run = None
            return own

    def _trace(self, function: _Function, state: RouterState, frozen: int) -> Program | None:
        named = _tensors(state)

        def of_tensors(*tensors: Tensor) -> Tensors:
            given: dict[str, Any] = dict(zip(named, tensors, strict=True))
            return function(replace(state, **given))

        target = self.predictor.view[frozen]
        return traced(of_tensors, tuple(named.values()), [self.predictor, target.norm, target.router])


def _tensors(state: RouterState) -> dict[str, Tensor]:
    """Return the tensors of a state by name."""
    found = {name: getattr(state, name) for name in TENSORS}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _random_state(view: MoEView, layer: int, previous: bool, generator: torch.Generator) -> RouterState:
    """Return a random state of one token, by the layer's own norm and router."""
    own, shape = view[layer], view.shape
    weight = next(own.router.parameters())
    residual_1D = torch.randn(1, shape.hidden, generator=generator).to(weight)
    router_input_1D = own.router_input(residual_1D)
    logits_1E, weights_1K, ids_1K = own.routed(router_input_1D)
    return RouterState(
        layer=layer, residual_TD=residual_1D, router_input_TD=router_input_1D, logits_TE=logits_1E,
        topk_ids_TK=ids_1K, topk_weights_TK=weights_1K,
        previous_logits_TLE=logits_1E.expand(shape.layers, -1, -1).transpose(0, 1) if previous else None,
    )  # fmt: skip
