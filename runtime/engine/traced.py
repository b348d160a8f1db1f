"""Forecasts of decode steps as traced programs: the same tensor operations without Python between them.

A forecast of one token is some fifty operations on a few hundred numbers: two thirds of its time is Python's. The trace
is taken from the predictor itself, once per layer and shape, and used only if it gives the predictor's own bits. On
CUDA, where the host takes longer to launch an operation than the device to compute it, the trace replays as a graph.
T tokens, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from expertcast.data.taps import capturing
from expertcast.predictors.base import Forecast, Predictor, RouterState
from expertcast.predictors.view import MoEView
from expertcast.runtime.engine.captured import Captures

_CHECKED_CALLS = 3
"""Calls, the traced one included, on which a trace is compared with its predictor."""

_TENSORS = (
    "residual_TD", "router_input_TD", "logits_TE", "topk_ids_TK", "topk_weights_TK", "previous_logits_TLE", "early_TD"
)  # fmt: skip
"""A state's tensors, in the order of a trace's inputs; the last two may be missing."""

_Inputs = tuple[Tensor, ...]
_Function = Callable[[RouterState], _Inputs]


@dataclass(slots=True)
class _Program:
    run: Callable[..., _Inputs] | None
    """None: the predictor itself runs."""
    checks_left: int = _CHECKED_CALLS
    replay: Callable[..., _Inputs] | None = None
    """The same as a graph."""


class TracedForecasts:
    """Forecasts by a predictor, bit for bit; faster from the second step of each shape on. On CUDA a forecast's tensors
    hold until the next forecast made at the same layer.

    Predictors that say `traceable = False`, and those whose trace differs on the first calls, run as they are.
    """

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._captures = Captures()
        self._programs: dict[tuple[object, ...], _Program] = {}

    @torch.no_grad()
    def prepare(self, view: MoEView, ahead: int, without: Container[int] = ()) -> None:
        """Trace the forecasts of a single text's decode steps, and check them, before the first one is due; none for
        layers `without` any."""
        if not self._predictor.traceable:
            return
        generator = torch.Generator().manual_seed(0)  # its own: sampled generation must not change
        for layer in (layer for layer in range(len(view) - ahead) if layer + ahead not in without):
            for _ in range(_CHECKED_CALLS):
                state = _random_state(view, layer, self._predictor.uses_previous_token, generator)
                if self._predictor.wants_early(layer, ahead):
                    state.early_TD = self.stand_in(state).to(state.residual_TD.dtype)
                self.forecast(state, ahead)

    def forecast(self, state: RouterState, ahead: int) -> Forecast:
        """As `predictor.forecast`."""

        def outputs(given: RouterState) -> _Inputs:
            made = self._predictor.forecast(given, ahead)
            return made.logits_TE, made.topk_ids_TK, made.topk_weights_TK

        logits_TE, ids_TK, weights_TK = self._run(("forecast", ahead), outputs, state, state.layer + ahead)
        return Forecast(
            layer=state.layer + ahead, logits_TE=logits_TE, topk_ids_TK=ids_TK, topk_weights_TK=weights_TK,
            log_odds=self._predictor.log_odds(state.layer, ahead),
        )  # fmt: skip

    def stand_in(self, state: RouterState) -> Tensor:
        """As `predictor.stand_in`."""
        (standing_TD,) = self._run(("stand_in",), lambda given: (self._predictor.stand_in(given),), state, state.layer)
        return standing_TD

    def routed(self, state: RouterState) -> Tensor:
        """Ids [T, K] that the next layer's router gives for `state.early_TD`."""
        following = self._predictor.view[state.layer + 1]

        def outputs(given: RouterState) -> _Inputs:
            assert given.early_TD is not None
            return (following.routed(following.router_input(given.early_TD))[2],)

        (ids_TK,) = self._run(("routed",), outputs, state, following.index)
        return ids_TK

    @torch.no_grad()
    def _run(self, kind: tuple[object, ...], function: _Function, state: RouterState, frozen: int) -> _Inputs:
        """The function's tensors, by its trace where that gives the same bits.

        Args:
            kind: names the function.
            function: of a state.
            state: of any number of tokens.
            frozen: the layer whose norm and router it may run.
        """
        if not self._predictor.traceable:
            return function(state)
        named = _tensors(state)
        key = (*kind, state.layer, len(state.residual_TD), *named)
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = _Program(self._trace(function, state, frozen))
        if program.run is None:
            return function(state)
        inputs = tuple(named.values())
        replay = None if capturing() else program.replay  # a graph may not launch another
        made = (replay or program.run)(*inputs)
        return self._checked(program, made, function(state), inputs) if program.checks_left else made

    def _checked(self, program: _Program, made: _Inputs, own: _Inputs, inputs: _Inputs) -> _Inputs:
        """The function's `own` outputs, of the same `inputs` as the `program` has `made`."""
        program.checks_left -= 1
        if not all(map(torch.equal, own, made)):
            program.run = None
        elif not program.checks_left and not capturing():
            assert program.run is not None
            program.replay = self._captures.of(program.run, inputs)
        return own

    def _trace(self, function: _Function, state: RouterState, frozen: int) -> Callable[..., _Inputs] | None:
        named = _tensors(state)

        def of_tensors(*tensors: Tensor) -> _Inputs:
            given: dict[str, Any] = dict(zip(named, tensors, strict=True))
            return function(replace(state, **given))

        target = self._predictor.view[frozen]
        with warnings.catch_warnings(), _frozen(self._predictor, target.norm, target.router):
            warnings.simplefilter("ignore")  # deprecation; and branches on values, which the checked calls look after
            try:
                traced = _traced(of_tensors, tuple(named.values()))
            except (RuntimeError, TypeError, ValueError, AttributeError):  # not this predictor, or not this torch
                return None

        def run(*tensors: Tensor) -> _Inputs:
            with torch.jit.optimized_execution(False):  # type: ignore[attr-defined, no-untyped-call]
                return traced(*tensors)

        return run


def _traced(function: Callable[..., _Inputs], inputs: _Inputs) -> Callable[..., _Inputs]:
    """As `torch.jit.trace`, which keeps what it traced, weights included, in a global unit for ever: this is freed.

    See github.com/pytorch/pytorch/issues/35600 and 43119.
    """
    graph, _ = torch._C._create_graph_by_tracing(function, inputs, lambda _: "", True, False)
    made: Callable[..., _Inputs] = torch._C._create_function_from_graph("forecast", graph)
    return made


@contextmanager
def _frozen(*modules: nn.Module) -> Iterator[None]:
    """A trace takes no parameter that asks for gradients."""
    asking = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
    for parameter in asking:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in asking:
            parameter.requires_grad_(True)


def _tensors(state: RouterState) -> dict[str, Tensor]:
    """By name, those that there are."""
    found = {name: getattr(state, name) for name in _TENSORS}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _random_state(view: MoEView, layer: int, previous: bool, generator: torch.Generator) -> RouterState:
    """A state of one token as the layer's own norm and router make it."""
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
