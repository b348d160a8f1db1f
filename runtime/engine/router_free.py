"""Router-free execution: at layers that execute their forecast the router never runs (row B15).

A forecast stands in for all that the router returns, its logits included: predictors that read the previous token's
routing then read what was forecast for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor

from expertcast.data.router_call import RouterOutput
from expertcast.predictors.base import Forecast
from expertcast.predictors.view import MoELayer


@contextmanager
def routers_left_out(layers: Iterable[MoELayer], forecast_for: Callable[[int], Forecast | None]) -> Iterator[None]:
    """Inside, a layer's router gives its forecast without running, where there is one.

    `layers` are those that execute forecasts; `forecast_for` tells a layer's, when its router would run.
    """
    with ExitStack() as stack:
        for layer in layers:
            layer.router.__dict__["forward"] = _Substitute(layer, forecast_for)
            stack.callback(layer.router.__dict__.pop, "forward")
        yield


class _Substitute:
    """In place of a router's forward."""

    def __init__(self, layer: MoELayer, forecast_for: Callable[[int], Forecast | None]) -> None:
        self._layer, self._forecast_for = layer, forecast_for
        self._own = layer.router.forward
        self.asked = False

    def __call__(self, hidden: Tensor, *args: object, **kwargs: object) -> RouterOutput:
        if self.asked:  # forecasts run routers, too
            return self._run(hidden, *args, **kwargs)
        self.asked = True
        try:
            forecast = self._forecast_for(self._layer.index)
        finally:
            self.asked = False
        if forecast is None:
            return self._run(hidden, *args, **kwargs)
        return forecast.logits_TE, forecast.topk_weights_TK, forecast.topk_ids_TK

    def _run(self, hidden: Tensor, *args: object, **kwargs: object) -> RouterOutput:
        made: RouterOutput = self._own(hidden, *args, **kwargs)
        return made
