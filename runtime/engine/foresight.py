"""A layer's forecast on the host's side: whether it pays, when it is made, and what is asked for by it.

On CUDA the host waits for a forecast before it launches the layer's experts: the link must know what comes next before
it has made the layer's own copies. A forecast by early attention runs beside the experts, and is taken after their
launch. T tokens, E routed experts per layer, K experts per token. A key is layer * E + expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from time import perf_counter

from torch import Tensor

from expertcast.data.router_call import RouterCall
from expertcast.predictors.base import Forecast
from expertcast.runtime.engine.beside import Beside
from expertcast.runtime.engine.flow import LayerFlow
from expertcast.runtime.engine.gate import ForecastGate
from expertcast.runtime.engine.quick import QuickForecasts
from expertcast.runtime.engine.speculation import Speculator
from expertcast.runtime.links.exchange import Pending, Readback


class _Made:
    """A forecast, and its ids and weights on their way to the host."""

    def __init__(self, forecast: Forecast, readback: Readback) -> None:
        self.forecast = forecast
        self.ids: Pending = readback.start(forecast.topk_ids_TK)
        self.weights: Pending = readback.start(forecast.topk_weights_TK)


class Foresight:
    """Makes forecasts and asks for their experts.

    Args:
        speculator: makes them.
        flow: is asked.
        readback: brings their ids to the host.
        gate: says which are worth making; None: all.
        told: hears what the model's thread does.
    """

    def __init__(
        self, speculator: Speculator, flow: LayerFlow, readback: Readback, *, gate: ForecastGate | None = None,
        told: Callable[..., None] | None = None,
    ) -> None:  # fmt: skip
        self._speculator, self._flow, self._readback = speculator, flow, readback
        self._gate, self._told = gate, told
        self._residency = flow.residency
        self._experts = speculator.view.shape.experts
        driver, self._looks_early = self._residency.link.driver, speculator.early is not None
        self._beside = Beside(driver) if driver is not None and self._looks_early else None
        """Where early attention runs, on CUDA."""
        self._layers = len(speculator.view)
        self._quick = QuickForecasts(self._layers)
        self._later: tuple[RouterCall, _Made | None, bool, float] | None = None
        """A layer whose forecast has not been asked for, whether it runs as a whole, and the seconds spent."""
        self.ids: dict[int, list[int]] = {}
        """Ids (flat) of forecasts by target layer, as far as the host has them."""

    def start(self) -> None:
        """A forward starts."""
        self._later = None
        self.ids.clear()
        self._quick.start()

    def learn(self, layer: int, keys: Sequence[int]) -> None:
        """The experts that a layer executes are known, by their keys."""
        if self._quick.made:
            self._quick.learn(layer, {key - layer * self._experts for key in keys})

    def make(self, call: RouterCall, executed: tuple[Tensor, Tensor] | None, whole: bool) -> None:
        """Make the forecast that is due at a layer.

        Args:
            call: the layer's.
            executed: (ids, weights) that it executes in place of its router's.
            whole: it runs in one chunk.
        """
        if self._told is not None:
            self._told("forecast", call.layer)
        start = 0.0 if self._gate is None else perf_counter()
        quick = self._ask_quick if self._looks_early and self._wants_quick(call.layer + 1) else None
        with nullcontext() if self._beside is None else self._beside.running():
            pays = None if self._gate is None else self._gate.pays
            forecast = self._speculator.forecast(call, executed, quick=quick, pays=pays)
            made = None if forecast is None else _Made(forecast, self._readback)
        if self._told is not None:
            self._told("policy", call.layer)
        self._later = call, made, whole, 0.0 if self._gate is None else perf_counter() - start
        if self._beside is None:
            self.take()

    def take(self) -> None:
        """Ask for what was forecast at the running layer, if that has not been done."""
        later, self._later = self._later, None
        if later is None:
            return
        call, made, whole, seconds = later
        if made is not None:
            start = 0.0 if self._gate is None else perf_counter()
            self._hint(made)
            if self._gate is not None:
                self._gate.took(seconds + perf_counter() - start)
            for further in self._speculator.further(call):
                if not self._residency.idle:  # the link has nearer layers' experts to bring
                    break
                self._hint(_Made(further, self._readback))
        self._flow.finish(call.layer)
        if whole:
            self._flow.stream(call.layer)

    def _wants_quick(self, layer: int) -> bool:
        return layer < self._layers and self._residency.idle and self._quick.worth(layer)

    def _ask_quick(self, layer: int, ids_TK: Tensor) -> None:
        """Ask at once for what a quick forecast is sure of."""
        sure = self._quick.sure(layer, self._readback.start(ids_TK).tolist())
        keys = [layer * self._experts + expert for expert in sure]
        if keys:
            self._quick.asked(layer, not all(map(self._residency.holds, keys)))
        self._residency.prefetch(keys)

    def _hint(self, made: _Made) -> None:
        ids_T = made.ids.tolist()
        self.ids[made.forecast.layer] = [expert for row in ids_T for expert in row]
        self._flow.hint(made.forecast, ids_T, made.weights.tolist())
