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
    "residual_TD", "router_input_TD", "logits_TE", "topk_ids_TK", "topk_weights_TK", "previous_logits_TLE"
)  # fmt: skip
"""A state's tensors, in the order of a trace's inputs; the last one may be missing."""

_Inputs = tuple[Tensor, ...]


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
        self._programs: dict[tuple[int, int, int, bool], _Program] = {}

    @torch.no_grad()
    def prepare(self, view: MoEView, ahead: int, without: Container[int] = ()) -> None:
        """Trace the forecasts of a single text's decode steps, and check them, before the first one is due; none for
        layers `without` any."""
        if not self._predictor.traceable:
            return
        generator = torch.Generator().manual_seed(0)  # its own: sampled generation must not change
        for layer in (layer for layer in range(len(view) - ahead) if layer + ahead not in without):
            for _ in range(_CHECKED_CALLS):
                self.forecast(_random_state(view, layer, self._predictor.uses_previous_token, generator), ahead)

    @torch.no_grad()
    def forecast(self, state: RouterState, ahead: int) -> Forecast:
        """As `predictor.forecast`."""
        if not self._predictor.traceable:
            return self._predictor.forecast(state, ahead)
        previous = state.previous_logits_TLE
        key = (state.layer, ahead, len(state.residual_TD), previous is None)
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = _Program(self._trace(state, ahead))
        if program.run is None:
            return self._predictor.forecast(state, ahead)
        replay = None if capturing() else program.replay  # a graph may not launch another
        logits_TE, ids_TK, weights_TK = (replay or program.run)(*_inputs(state))
        made = Forecast(layer=state.layer + ahead, logits_TE=logits_TE, topk_ids_TK=ids_TK, topk_weights_TK=weights_TK)
        return self._checked(program, made, state, ahead) if program.checks_left else made

    def _checked(self, program: _Program, made: Forecast, state: RouterState, ahead: int) -> Forecast:
        program.checks_left -= 1
        own = self._predictor.forecast(state, ahead)
        if own.layer != made.layer or not all(map(torch.equal, _outputs(own), _outputs(made))):
            program.run = None
        elif not program.checks_left and not capturing():
            assert program.run is not None
            program.replay = self._captures.of(program.run, _inputs(state))
        return own

    def _trace(self, state: RouterState, ahead: int) -> Callable[..., _Inputs] | None:
        def forecast(*tensors: Tensor) -> _Inputs:
            given: dict[str, Any] = dict(zip(_TENSORS, tensors, strict=False))
            return _outputs(self._predictor.forecast(replace(state, **given), ahead))

        target = self._predictor.view[state.layer + ahead]
        with warnings.catch_warnings(), _frozen(self._predictor, target.norm, target.router):
            warnings.simplefilter("ignore")  # deprecation; and branches on values, which the checked calls look after
            try:
                traced = _traced(forecast, _inputs(state))
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


def _inputs(state: RouterState) -> _Inputs:
    own = (state.residual_TD, state.router_input_TD, state.logits_TE, state.topk_ids_TK, state.topk_weights_TK)
    return own if state.previous_logits_TLE is None else (*own, state.previous_logits_TLE)


def _outputs(forecast: Forecast) -> _Inputs:
    return forecast.logits_TE, forecast.topk_ids_TK, forecast.topk_weights_TK


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
