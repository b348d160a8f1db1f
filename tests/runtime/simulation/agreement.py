"""The simulator against the runtime: one decoding measured on the emulated link, and simulated from what it recorded.

T tokens, D hidden size, L MoE layers, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast.data.batch import TraceBatch
from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors import ExpertcastError, Forecast, MoEView, Predictor
from expertcast.predictors.messages import Json
from expertcast.predictors.next_token import NextToken, NextTokenTracker
from expertcast.runtime.benchmarking.runs import decode_greedily
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.offloading import offload, resolve_next_token, resolve_predictor
from expertcast.runtime.recording.recorder import LayerTimes, Observer, Recorder, layer_times
from expertcast.runtime.recording.statistics import RunStatistics
from expertcast.runtime.simulation.machine import Case, Machine
from expertcast.runtime.simulation.simulator import simulate
from expertcast.runtime.simulation.trace import Hints, Routes, Trace, trace_of
from expertcast.runtime.storage.layout import FULL, PRECISIONS

COUNTS = ("requests", "hits", "misses", "collisions", "skipped", "bytes_moved")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One decoding in the runtime, of which everything is known that a simulation needs."""

    trace: Trace
    case: Case
    """The simulation of the same run."""
    counts: dict[str, int]
    """Of the decode steps."""
    tpot_s: float
    """Median."""
    next_token: NextToken | None = None
    """What the eviction policy looked ahead with."""


def measure(model: PreTrainedModel, prompt_ids: Tensor, config: OffloadConfig, *, new_tokens: int = 64) -> Measured:
    """Decode over the emulated link.

    Args:
        model: as :func:`expertcast.offload` takes it, on the CPU.
        prompt_ids: [1, T], no longer than the tokens that are decoded.
        config: with a bandwidth; forecasts are of one layer ahead.
        new_tokens: how many are decoded; the first comes from the prefill.

    Raises:
        ExpertcastError: a prompt that is longer; no bandwidth; or as :func:`expertcast.offload`.
    """
    if prompt_ids.shape[1] > new_tokens - 1:
        raise ExpertcastError(f"new_tokens={new_tokens} for a prompt of {prompt_ids.shape[1]}: give more new tokens")
    bandwidth = config.bandwidth
    if bandwidth is None:
        raise ExpertcastError("no bandwidth for the emulated link: give bytes per second, such as 1e9")
    view, recorder, seen = find_moe_layers(model), Recorder(), _Seen()
    policies = config.resolved_policies()
    predictor, _ = resolve_predictor(config.resolved_predictor(), view)
    next_token = resolve_next_token(config.next_token, view, policies, torch.device("cpu"))
    config = replace(config, link="emulated", predictor=predictor, next_token=next_token)
    with offload(model, config, observers=[recorder, seen]) as offloaded:
        decoding = decode_greedily(model, prompt_ids, new_tokens, offloaded=offloaded, recorder=recorder)
        block_bytes = {FULL: offloaded.store.layout.block_bytes}
        block_bytes |= {name: offloaded.link.block_bytes(name) for name in PRECISIONS if name in offloaded.store.packed}
        counts = _counts(offloaded.stats)
        times = _of_top_k(layer_times(recorder), offloaded.stats, view.shape.top_k)
        slots = offloaded.pool.count
    machine = Machine(
        times=times,
        block_bytes=block_bytes,
        bandwidth=bandwidth,
        latency=config.latency,
        expand_s=statistics.median(seen.expanding_s) if seen.expanding_s else 0.0,
    )
    name = None if predictor is None else predictor.name
    return Measured(
        trace=_trace(view, seen, prompt_ids[0], decoding.tokens, predictor),
        case=Case(policies=policies, slots=slots, machine=machine, predictor=name, cache=config.cache),
        counts=counts,
        tpot_s=statistics.median(decoding.steps_s),
        next_token=next_token,
    )


def compare(measured: Measured, times: LayerTimes | None = None) -> Json:
    """Simulate what was measured.

    Args:
        measured: a run.
        times: other layers' times than the run's own.

    Returns:
        `measured` and `simulated`, each with counts and `tpot_s`; `same_counts`, and `tpot_error` = simulated /
        measured - 1.
    """
    case, trace = measured.case, measured.trace
    if measured.next_token is not None:
        trace = trace.looking_ahead(NextTokenTracker(measured.next_token))
    done = simulate(trace, case if times is None else case.timed(times))
    counts = _counts(done.decode)
    return {
        **case.policies.as_dict(),
        "predictor": case.predictor,
        "slots": case.slots,
        "bandwidth": case.machine.bandwidth,
        "measured": {**measured.counts, "tpot_s": measured.tpot_s},
        "simulated": {**counts, "tpot_s": done.tpot_s},
        "same_counts": counts == measured.counts,
        "tpot_error": done.tpot_s / measured.tpot_s - 1,
    }


class _Seen(Observer):
    """What the routers said, before any policy had its word; and seconds of each expansion of a packed copy."""

    def __init__(self) -> None:
        self.calls: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """Per layer the residual [T, D] and the logits [T, E] of each of its calls."""
        self.expanding_s: list[float] = []

    def routed(self, layer: int, residual_TD: Tensor, logits_TE: Tensor) -> None:
        self.calls.setdefault(layer, []).append((residual_TD.clone(), logits_TE.clone()))

    def expanded(self, key: int, seconds: float) -> None:
        self.expanding_s.append(seconds)


def _counts(stats: RunStatistics) -> dict[str, int]:
    return {name: value for name, value in asdict(stats.total).items() if name in COUNTS}


def _of_top_k(times: LayerTimes, stats: RunStatistics, top_k: int) -> LayerTimes:
    """Times of K experts per layer from those of a run that may have executed fewer."""
    experts_s = [
        seconds * top_k * layer.steps / layer.requests
        for seconds, layer in zip(times.experts_s, stats.layers, strict=True)
    ]
    return replace(times, experts_s=experts_s)


@torch.no_grad()
def _trace(view: MoEView, seen: _Seen, prompt_T: Tensor, decoded: list[int], predictor: Predictor | None) -> Trace:
    """The routing of a decoding as its routers chose by their logits."""
    residual, logits = (
        [torch.cat([call[part] for call in seen.calls[layer]]) for layer in range(len(view))] for part in (0, 1)
    )
    routed = [layer.route(logits_TE) for layer, logits_TE in zip(view, logits, strict=True)]
    routes = Routes(
        view=view,
        logits=logits,
        ids=[ids_TK for ids_TK, _ in routed],
        weights=[weights_TK for _, weights_TK in routed],
        residual=residual,
        token_T=torch.cat([prompt_T, torch.tensor(decoded)])[: len(logits[0])],
    )
    document_T = torch.zeros(len(logits[0]), dtype=torch.long)
    hints = {} if predictor is None else {predictor.name: _hints(view, routes, predictor)}
    return trace_of(view.shape, routes, document_T, prefill=len(prompt_T), hints=hints)


def _hints(view: MoEView, routes: Routes, predictor: Predictor) -> Hints:
    """Forecasts token by token, as in decode steps: a batch of them would differ in its last bits."""
    rows = TraceBatch(
        residual_TLD=torch.stack(routes.residual, dim=1),
        logits_TLE=torch.stack(routes.logits, dim=1),
        document_T=torch.zeros(len(routes.logits[0]), dtype=torch.long),
        position_T=torch.arange(len(routes.logits[0])),
    ).with_previous()
    forecasts = {
        layer + 1: Forecast.join([predictor.forecast(rows[t : t + 1].state(view, layer)) for t in range(len(rows))])
        for layer in range(len(view) - 1)
    }
    return Hints(ahead=1, forecasts=forecasts)
