"""Recorders, layer times and traces made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from expertcast.predictors import Forecast
from expertcast.predictors.view import ModelShape
from expertcast.runtime.benchmarking.bench import decode_greedily
from expertcast.runtime.offloading import OffloadedModel
from expertcast.runtime.policies import Policies
from expertcast.runtime.recording.recorder import Recorder
from expertcast.runtime.simulation.machine import Case, LayerTimes, Machine, Simulation
from expertcast.runtime.simulation.simulator import simulate
from expertcast.runtime.simulation.trace import Forward, Hints, Trace


def layer_times(
    before: Sequence[float],
    experts: Sequence[float],
    *,
    forecast: float = 0.0,
) -> LayerTimes:
    """Times of L layers; a forecast takes as long at each."""
    return LayerTimes(before_s=list(before), forecast_s=[forecast] * len(before), experts_s=list(experts))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How the runtime is set up; an expert has 1000 bytes."""

    slots: int
    copy_s: float
    cache: bool = True

    def case(self, times: LayerTimes) -> Case:
        machine = Machine(times=times, block_bytes={"full": 1000}, bandwidth=1000 / self.copy_s)
        return Case(policies=Policies(), slots=self.slots, machine=machine, cache=self.cache)


def replay(trace: Trace, times: LayerTimes, setting: Setting, asked: Hints | None = None) -> Simulation:
    """Simulate a decoding."""
    hints = {} if asked is None else {"made": asked}
    case = replace(setting.case(times), predictor=next(iter(hints), None))
    return simulate(replace(trace, hints=hints), case)


Routing = Sequence[Sequence[int]]
"""[L] keys that each layer needs."""


def decoding(prefill: Routing, steps: Sequence[Routing], *, experts: int, top_k: int = 2) -> Trace:
    """The routing of one decoding as it is seen from outside."""
    shape = ModelShape(layers=len(prefill), experts=experts, top_k=top_k, hidden=0)
    forwards = [
        Forward(fresh=index == 0, rows=slice(max(0, index - 1), index), keys=[list(keys) for keys in routing])
        for index, routing in enumerate([prefill, *steps])
    ]
    return Trace(shape=shape, forwards=forwards)


def routings(trace: Trace) -> list[list[list[int]]]:
    """What each layer of each decode step needs."""
    return [forward.keys for forward in trace.forwards if not forward.fresh]


def perfect(trace: Trace, ahead: int = 1) -> Hints:
    """Forecasts of the experts that every layer needs."""
    experts = trace.shape.experts

    def forecast(layer: int) -> Forecast:
        ids_TK = torch.tensor([keys[layer] for keys in routings(trace)]) % experts
        logits_TE = torch.zeros(len(ids_TK), experts).scatter(1, ids_TK, 1.0)
        ones_TK = torch.ones(ids_TK.shape)
        return Forecast(layer=layer, logits_TE=logits_TE, topk_ids_TK=ids_TK, topk_weights_TK=ones_TK)

    return Hints(ahead=ahead, forecasts={layer: forecast(layer) for layer in range(ahead, trace.shape.layers)})


def record(offloaded: OffloadedModel, prompt_ids: Tensor, new_tokens: int, recorder: Recorder) -> list[float]:
    """Decode into a recorder that the offload was given; seconds of each decode step."""
    return decode_greedily(offloaded.model, prompt_ids, new_tokens, offloaded=offloaded, recorder=recorder).steps_s
