"""A model, resident or offloaded, that runs with forecasts executed: hooks only, for whole texts too.

T tokens, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

from torch import Tensor
from transformers import PreTrainedModel

from expertcast.data.early import EarlyAttention
from expertcast.data.router_call import RouterCall
from expertcast.data.taps import RouterTaps
from expertcast.predictors.base import Predictor
from expertcast.predictors.view import MoEView
from expertcast.runtime.engine.speculation import Speculator


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
    router_free: bool = False,
    execute: bool = True,
    observe: Callable[[RouterCall, Tensor], object] | None = None,
) -> Iterator[Speculator]:
    """Run a model, resident or offloaded, with forecasts executed at its MoE layers; hooks only.

    Args:
        model: whose layers `view` holds.
        view, predictor, true_weights, ahead: as for :class:`Speculator`.
        layers: layers that execute their forecast; None for all that have one.
        prefill: speculate in steps of more than one token per sequence too (teacher-forced evaluation).
        router_free: layers that execute their forecast leave their router out.
        execute: False leaves the routers' choice as it is: forecasts are made from each other, and nothing drifts.
        observe: called after each router with the call and the ids [T, K] that the layer executes, or would.

    Raises:
        ExpertcastError: `layers` or `ahead` outside what model and predictor have.
    """
    chosen = range(len(view)) if layers is None else layers
    early = EarlyAttention(model, view) if predictor.uses_early else None
    speculator = Speculator(
        view, predictor, layers=chosen, true_weights=true_weights, prefill=prefill, ahead=ahead, early=early,
        router_free=router_free,
    )  # fmt: skip

    def on_router(call: RouterCall) -> tuple[Tensor, Tensor] | None:
        executed = speculator.executed(call)
        speculator.forecast(call, executed)
        if observe is not None:
            observe(call, call.ids_TK if executed is None else executed[0])
        return executed if execute else None

    taps = RouterTaps(model, view, on_router, lambda fresh, _ids: speculator.start(fresh))
    with closing(taps), speculator.following():
        yield speculator
