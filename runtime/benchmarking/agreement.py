"""The simulator against the runtime: one decoding measured on the emulated link, and simulated from what it recorded.

T tokens, D hidden size, L MoE layers, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast.data.batch import TraceBatch
from expertcast.data.discovery import find_moe_layers
from expertcast.predictors import ExpertcastError, MoEView, Predictor
from expertcast.predictors.base import Forecast
from expertcast.predictors.next_token import NextToken
from expertcast.predictors.next_token_tracker import NextTokenTracker
from expertcast.runtime.benchmarking.decoding import decode_greedily
from expertcast.runtime.engine.flow import LayerFlow
from expertcast.runtime.links.base import Copy, Link
from expertcast.runtime.offloading import offload
from expertcast.runtime.policies import Policies
from expertcast.runtime.recording.layer_times import LayerTimes, layer_times
from expertcast.runtime.recording.recorder import Recorder
from expertcast.runtime.recording.statistics import RunStatistics
from expertcast.runtime.simulation.events import Hints, Routes, Trace, trace_of
from expertcast.runtime.simulation.machine import Machine
from expertcast.runtime.simulation.simulator import simulate
from expertcast.runtime.storage.precision import FULL, PRECISIONS

COUNTS = ("requests", "hits", "misses", "collisions", "skipped", "bytes_moved")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One decoding in the runtime, of which everything is known that a simulation needs."""

    policies: Policies
    slots: int
    trace: Trace
    machine: Machine
    counts: dict[str, int]
    """Of the decode steps."""
    tpot_s: float
    """Median."""
    next_token: NextToken | None = None
    """What the eviction policy looked ahead with."""


def measure(
    model: PreTrainedModel,
    prompt_ids: Tensor,
    *,
    policies: Policies,
    slots: int,
    bandwidth: float,
    latency: float = 0.0,
    new_tokens: int = 64,
    predictor: Predictor | None = None,
    next_token: NextToken | None = None,
) -> Measured:
    """Decode over the emulated link.

    Args:
        prompt_ids: [1, T], no longer than the tokens that are decoded.
        predictor: bound to the model, one layer ahead.
        next_token: bound to the model, for the eviction policy `forecast`.

    Raises:
        ExpertcastError: a prompt that is longer; or as :func:`expertcast.offload`.
    """
    if prompt_ids.shape[1] > new_tokens - 1:
        raise ExpertcastError(f"new_tokens={new_tokens} for a prompt of {prompt_ids.shape[1]}: give more new tokens")
    view, recorder = find_moe_layers(model), Recorder()
    arguments: dict[str, Any] = {"bandwidth": bandwidth, "latency": latency, "link": "emulated"}
    arguments |= {"predictor": predictor, "next_token": next_token}
    with offload(model, policies=policies, slots=slots, observers=[recorder], **arguments) as offloaded:
        with _seen(offloaded.flow, len(view)) as seen, _expanding(offloaded.link) as expanding_s:
            decoding = decode_greedily(model, prompt_ids, new_tokens, offloaded=offloaded, recorder=recorder)
        block_bytes = {FULL: offloaded.store.layout.block_bytes}
        block_bytes |= {name: offloaded.link.block_bytes(name) for name in PRECISIONS if name in offloaded.store.packed}
        counts = _counts(offloaded.stats)
        times = _of_top_k(layer_times(recorder), offloaded.stats, view.shape.top_k)
    machine = Machine(
        times=times,
        block_bytes=block_bytes,
        bandwidth=bandwidth,
        latency=latency,
        expand_s=statistics.median(expanding_s) if expanding_s else 0.0,
    )
    return Measured(
        policies=policies,
        slots=slots,
        trace=_trace(view, seen, prompt_ids.shape[1], predictor),
        machine=machine,
        counts=counts,
        tpot_s=statistics.median(decoding.steps_s),
        next_token=next_token,
    )


def compare(measured: Measured, times: LayerTimes | None = None) -> dict[str, Any]:
    """Simulate what was measured.

    Args:
        times: other layers' times than the run's own.

    Returns:
        `measured` and `simulated`, each with counts and `tpot_s`; `same_counts`, and `tpot_error` = simulated /
        measured - 1.
    """
    machine = measured.machine if times is None else replace(measured.machine, times=times)
    predictor = next(iter(measured.trace.hints), None)
    next_token = measured.next_token
    done = simulate(
        measured.trace,
        measured.policies,
        measured.slots,
        machine,
        predictor=predictor,
        tokens_ahead=None if next_token is None else lambda: NextTokenTracker(next_token),
    )
    counts = _counts(done.decode)
    return {
        **measured.policies.as_dict(),
        "predictor": predictor,
        "slots": measured.slots,
        "bandwidth": machine.bandwidth,
        "measured": {**measured.counts, "tpot_s": measured.tpot_s},
        "simulated": {**counts, "tpot_s": done.tpot_s},
        "same_counts": counts == measured.counts,
        "tpot_error": done.tpot_s / measured.tpot_s - 1,
    }


def _counts(stats: RunStatistics) -> dict[str, int]:
    return {name: value for name, value in asdict(stats.total).items() if name in COUNTS}


def _of_top_k(times: LayerTimes, stats: RunStatistics, top_k: int) -> LayerTimes:
    """Times of K experts per layer from those of a run that may have executed fewer."""
    experts_s = [
        seconds * top_k * layer.steps / layer.requests
        for seconds, layer in zip(times.experts_s, stats.layers, strict=True)
    ]
    return replace(times, experts_s=experts_s)


@contextmanager
def _expanding(link: Link) -> Iterator[list[float]]:
    """Seconds of each expansion of a packed copy."""
    expand, taken_s = link.expand, list[float]()

    def timed(copy: Copy) -> None:
        start = time.perf_counter()
        expand(copy)
        taken_s.append(time.perf_counter() - start)

    link.__dict__["expand"] = timed  # shadows the method of this one object
    try:
        yield taken_s
    finally:
        del link.__dict__["expand"]


_Seen = list[list[tuple[Tensor, Tensor]]]
"""Per layer the residual [T, D] and the logits [T, E] of each of its calls."""


@contextmanager
def _seen(flow: LayerFlow, layers: int) -> Iterator[_Seen]:
    """Collect what the routers of an offloaded model say meanwhile, before any policy has its word."""
    calls: _Seen = [[] for _ in range(layers)]
    see, wanted = flow.see, flow.reads_logits

    def on_router(layer: int, residual_TD: Tensor, logits_TE: Tensor, sequences: int) -> None:
        calls[layer].append((residual_TD.clone(), logits_TE.clone()))
        if wanted:
            see(layer, residual_TD, logits_TE, sequences)

    flow.__dict__.update(see=on_router, reads_logits=True)  # shadow the method of this one object
    try:
        yield calls
    finally:
        del flow.__dict__["see"]
        flow.reads_logits = wanted


@torch.no_grad()
def _trace(view: MoEView, seen: _Seen, prompt: int, predictor: Predictor | None) -> Trace:
    """The routing of a decoding as its routers chose by their logits."""
    residual = [torch.cat([residual_TD for residual_TD, _ in calls]) for calls in seen]
    logits = [torch.cat([logits_TE for _, logits_TE in calls]) for calls in seen]
    routed = [layer.route(logits_TE) for layer, logits_TE in zip(view, logits, strict=True)]
    routes = Routes(
        view=view,
        logits=logits,
        ids=[ids_TK for ids_TK, _ in routed],
        weights=[weights_TK for _, weights_TK in routed],
        residual=residual,
    )
    document_T = torch.zeros(len(logits[0]), dtype=torch.long)
    hints = {} if predictor is None else {predictor.name: _hints(view, routes, predictor)}
    return trace_of(view.shape, routes, document_T, prefill=prompt, hints=hints)


def _hints(view: MoEView, routes: Routes, predictor: Predictor) -> Hints:
    """Forecasts token by token, as in decode steps: a batch of them would differ in its last bits."""
    rows = TraceBatch(
        residual_TLD=torch.stack(routes.residual, dim=1),
        logits_TLE=torch.stack(routes.logits, dim=1),
        document_T=torch.zeros(len(routes.logits[0]), dtype=torch.long),
        position_T=torch.arange(len(routes.logits[0])),
    ).with_previous()
    forecasts = {}
    for layer in range(len(view) - 1):
        made = [predictor.forecast(rows[t : t + 1].state(view, layer)) for t in range(len(rows))]
        forecasts[layer + 1] = Forecast(
            layer=layer + 1,
            logits_TE=torch.cat([forecast.logits_TE for forecast in made]),
            topk_ids_TK=torch.cat([forecast.topk_ids_TK for forecast in made]),
            topk_weights_TK=torch.cat([forecast.topk_weights_TK for forecast in made]),
        )
    return Hints(ahead=1, forecasts=forecasts)
