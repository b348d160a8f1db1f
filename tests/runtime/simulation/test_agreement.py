"""The runtime over the emulated link and the simulator count the same, decision by decision.

T tokens, D hidden size, L MoE layers, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast.data.batch import TraceBatch
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.text import load_documents
from expertcast.predictors import Forecast, MoEView, Predictor
from expertcast.runtime.benchmarking.bench import decode_greedily
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.forecasters import resolve_predictor
from expertcast.runtime.offloading import offload
from expertcast.runtime.policies import Policies
from expertcast.runtime.recording.recorder import Observer, Recorder, RunStatistics
from expertcast.runtime.simulation.machine import Case, LayerTimes, Machine
from expertcast.runtime.simulation.simulator import simulate
from expertcast.runtime.simulation.trace import Hints, Routes, Trace, trace_of
from expertcast.runtime.storage.layout import FULL, PRECISIONS

LINK = OffloadConfig(bandwidth=2e9)


@pytest.fixture(scope="module")
def prompt_ids(reference_tokenizer: Any) -> torch.Tensor:
    text = load_documents(["reference"])[0].text[:400]
    return torch.tensor([reference_tokenizer(text)["input_ids"][:16]])


RUNS = {
    "lru": (Policies(eviction="lru"), 60),
    "prefill in chunks": (Policies(eviction="lru", scope="layer"), 72),
    "prompt of more than the slots": (Policies(), 100),
    "prompt of more than a layer's slots": (Policies(scope="layer"), 72),
    "lfu": (Policies(eviction="lfu"), 190),
    "score": (Policies(eviction="score"), 120),
    "drop": (Policies(eviction="least_stale", miss="drop"), 100),
    "packed": (Policies(eviction="lru", miss="fetch_lowest"), 100),
    "cache_aware": (Policies(eviction="lru", routing="cache_aware"), 100),
}


@pytest.mark.parametrize(("policies", "slots"), RUNS.values(), ids=RUNS)
def test_same_counts(reference_model: PreTrainedModel, prompt_ids: Tensor, policies: Policies, slots: int) -> None:
    config = replace(LINK, policies=policies, slots=slots)
    measured, simulated = counts_of_both(reference_model, prompt_ids, config)
    assert simulated == measured
    assert min(measured["hits"], measured["misses"], measured["bytes_moved"]) > 0


COUNTS = ("requests", "hits", "misses", "collisions", "skipped", "bytes_moved")


def counts_of_both(
    model: PreTrainedModel, prompt_ids: Tensor, config: OffloadConfig, *, new_tokens: int = 24
) -> tuple[dict[str, int], dict[str, int]]:
    """Counts of the decode steps of one decoding over the emulated link, and of its simulation.

    Args:
        prompt_ids: [1, T], no longer than the tokens that are decoded.
        config: with a bandwidth; forecasts are of one layer ahead.
    """
    view, recorder, seen = find_moe_layers(model), Recorder(), _Seen()
    policies, bandwidth = config.resolved_policies(), config.bandwidth
    assert bandwidth is not None
    predictor, _ = resolve_predictor(config.resolved_predictor(), view)
    config = replace(config, link="emulated", predictor=predictor, forecasts="always")
    with offload(model, config, observers=[recorder, seen]) as offloaded:
        decode_greedily(model, prompt_ids, new_tokens, offloaded=offloaded, recorder=recorder)
        block_bytes = {FULL: offloaded.store.layout.block_bytes}
        block_bytes |= {name: offloaded.link.block_bytes(name) for name in PRECISIONS if name in offloaded.store.packed}
        measured = _counts(offloaded.stats)
        times = _of_top_k(_layer_times(recorder, len(view)), offloaded.stats, view.shape.top_k)
        slots = offloaded.pool.count
    machine = Machine(
        times=times, block_bytes=block_bytes, bandwidth=bandwidth, latency=config.latency,
        expand_s=statistics.median(seen.expanding_s) if seen.expanding_s else 0.0,
    )  # fmt: skip
    name = None if predictor is None else predictor.name
    trace = _trace(view, seen, prompt_ids.shape[1], predictor)
    case = Case(policies=policies, slots=slots, machine=machine, predictor=name, cache=config.cache)
    return measured, _counts(simulate(trace, case).decode)


class _Seen(Observer):
    """Records the outputs of the routers before any policy, and the seconds of each expansion of a packed copy."""

    def __init__(self) -> None:
        self.calls: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """Residual [T, D] and logits [T, E] of each call, by layer."""
        self.expanding_s: list[float] = []

    def routed(self, layer: int, residual_TD: Tensor, logits_TE: Tensor) -> None:
        self.calls.setdefault(layer, []).append((residual_TD.clone(), logits_TE.clone()))

    def expanded(self, key: int, seconds: float) -> None:
        self.expanding_s.append(seconds)


def _counts(stats: RunStatistics) -> dict[str, int]:
    return {name: value for name, value in asdict(stats.total).items() if name in COUNTS}


def _layer_times(recorder: Recorder, layers: int) -> LayerTimes:
    """Median times of each layer; what follows the last one is left out."""
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for (_, layer), spans in groupby(recorder.spans(), key=lambda span: (span.step, span.layer)):
        part, seconds = "before", defaultdict[str, float](float)
        for span in spans:
            if span.state == "wait":
                part = "experts"
            else:
                seconds["forecast" if span.state == "forecast" else part] += span.seconds
        for name in ("before", "forecast", "experts"):
            found[name, layer].append(seconds[name])
    before, forecast, experts = (
        [statistics.median(found[name, layer]) for layer in range(layers)] for name in ("before", "forecast", "experts")
    )
    return LayerTimes(before_s=before, forecast_s=forecast, experts_s=experts)


def _of_top_k(times: LayerTimes, stats: RunStatistics, top_k: int) -> LayerTimes:
    """Times of K experts per layer from those of a run that may have executed fewer."""
    experts_s = [
        seconds * top_k * layer.steps / layer.requests
        for seconds, layer in zip(times.experts_s, stats.layers, strict=True)
    ]
    return replace(times, experts_s=experts_s)


@torch.no_grad()
def _trace(view: MoEView, seen: _Seen, prompt: int, predictor: Predictor | None) -> Trace:
    """Return the routing of a run, from the logits of its routers."""
    residual, logits = [
        [torch.cat([call[part] for call in seen.calls[layer]]) for layer in range(len(view))] for part in (0, 1)
    ]
    routed = [layer.route(logits_TE) for layer, logits_TE in zip(view, logits, strict=True)]
    routes = Routes(
        view=view, logits=logits, ids=[ids_TK for ids_TK, _ in routed], weights=[weights_TK for _, weights_TK in routed]
    )
    document_T = torch.zeros(len(logits[0]), dtype=torch.long)
    hints = {} if predictor is None else {predictor.name: _hints(view, residual, logits, predictor)}
    return trace_of(view.shape, routes, document_T, prefill=prompt, hints=hints)


def _hints(view: MoEView, residual: list[Tensor], logits: list[Tensor], predictor: Predictor) -> Hints:
    """Forecasts token by token, as in decode steps: a batch of them would differ in its last bits."""
    rows = TraceBatch(
        residual_TLD=torch.stack(residual, dim=1),
        logits_TLE=torch.stack(logits, dim=1),
        document_T=torch.zeros(len(logits[0]), dtype=torch.long),
        position_T=torch.arange(len(logits[0])),
    ).with_previous()
    forecasts = {
        layer + 1: Forecast.join([predictor.forecast(rows[t : t + 1].state(view, layer)) for t in range(len(rows))])
        for layer in range(len(view) - 1)
    }
    return Hints(ahead=1, forecasts=forecasts)
