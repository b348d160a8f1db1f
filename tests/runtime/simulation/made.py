"""Small traces with given routing."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch

from expertcast.predictors.base import Forecast
from expertcast.predictors.view import ModelShape
from expertcast.runtime.policies import Policies
from expertcast.runtime.simulation.machine import Case, Machine, Simulation, constant_times
from expertcast.runtime.simulation.simulator import simulate as simulate_case
from expertcast.runtime.simulation.trace import Hints, Routes, Trace, trace_of

Experts = Sequence[Sequence[Sequence[int]]]
"""[T][L][K] experts, 0..E-1."""


def trace(
    needed: Experts,
    *,
    experts: int,
    documents: Sequence[int] | None = None,
    prefill: int = 1,
    batch: int = 1,
    hints: Mapping[int, Sequence[Sequence[int]]] | None = None,
) -> Trace:
    """Return a trace.

    Args:
        needed: experts of each token at each layer.
        experts: experts per layer, E.
        documents: number of tokens of each document; None: one document.
        prefill: number of tokens in the prefill of each document.
        batch: number of documents decoded together.
        hints: forecast experts of each token by target layer, one layer ahead, by a predictor named `made`.
    """
    ids_TLK = torch.tensor(needed)
    count, layers, top_k = ids_TLK.shape
    shape = ModelShape(layers=layers, experts=experts, top_k=top_k, hidden=1)
    logits_TLE = torch.zeros(count, layers, experts).scatter(2, ids_TLK, 9.0)
    weights_TK = torch.full((count, top_k), 1 / top_k)
    routes = Routes(logits=list(logits_TLE.unbind(1)), ids=list(ids_TLK.unbind(1)), weights=[weights_TK] * layers)
    lengths = torch.tensor(documents or [count])
    document_T = torch.arange(len(lengths)).repeat_interleave(lengths)
    forecasts = {
        layer: Forecast(
            layer=layer,
            logits_TE=torch.zeros(count, experts).scatter(1, torch.tensor(ids), 9.0),
            topk_ids_TK=torch.tensor(ids),
            topk_weights_TK=weights_TK,
        )
        for layer, ids in (hints or {}).items()
    }
    made = {"made": Hints(ahead=1, forecasts=forecasts)} if hints else {}
    return trace_of(shape, routes, document_T, prefill=prefill, batch=batch, hints=made)


def random_trace(seed: int, *, tokens: int = 60, layers: int = 3, experts: int = 6, top_k: int = 2) -> Trace:
    choose = random.Random(seed)
    needed = [[choose.sample(range(experts), top_k) for _ in range(layers)] for _ in range(tokens)]
    return trace(needed, experts=experts, prefill=4)


def machine(layers: int, *, layer_s: float = 2.0, copy_s: int = 3) -> Machine:
    """Half of `layer_s` before a layer's experts are known, half in them; a copy takes as many seconds as bytes."""
    return Machine(times=constant_times(layers, layer_s), block_bytes={"full": copy_s}, bandwidth=1.0)


def simulate(
    trace: Trace, policies: Policies, slots: int, machine: Machine, *, predictor: str | None = None
) -> Simulation:
    """Simulate a case that is put together from its parts."""
    return simulate_case(trace, Case(policies=policies, slots=slots, machine=machine, predictor=predictor))
