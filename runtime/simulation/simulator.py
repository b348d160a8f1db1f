"""A runtime in virtual time: the flow, the books and the policies of the real one over a link that counts seconds.

A layer goes through the same events as in :class:`expertcast.runtime.engine.host.HostEngine`:

    compute     | before | request | forecast | prefetch | launch | wait ... | experts |
    link                           [ miss ][ miss ][ forecast ][ forecast ] ...

T tokens, L MoE layers, E routed experts per layer, K experts per token. An expert's key is layer * E + expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from expertcast.predictors.base import Forecast
from expertcast.runtime.engine.flow import LayerFlow, TokenForecasts
from expertcast.runtime.engine.residency import Residency
from expertcast.runtime.links.virtual import VirtualLink
from expertcast.runtime.policies.registry import CacheShape
from expertcast.runtime.policies.settings import Policies
from expertcast.runtime.recording.layer_times import LayerTimes
from expertcast.runtime.recording.statistics import RunStatistics
from expertcast.runtime.simulation.bounds import foretell
from expertcast.runtime.simulation.events import Forward, Hints, Trace, asked_for
from expertcast.runtime.simulation.machine import Machine, Simulation, check_slots
from expertcast.runtime.storage.layout import BlockLayout, Field
from expertcast.runtime.storage.precision import FULL
from expertcast.runtime.storage.slots import SlotPool


class VirtualRuntime:
    """Slots, link, flow and clock of one run.

    Args:
        slots: experts that fit on the device.
        keep: a cache; without one, slots are given back as soon as a layer has run.
        carry: see :class:`LayerFlow`.
        predictor: whose hints of the trace are given; None: nobody's.
        tokens_ahead: what an eviction policy looks ahead with.
    """

    def __init__(
        self,
        trace: Trace,
        policies: Policies,
        slots: int,
        link: VirtualLink,
        times: LayerTimes,
        *,
        block_bytes: int = 1,
        keep: bool = True,
        carry: int = 0,
        predictor: str | None = None,
        tokens_ahead: TokenForecasts | None = None,
    ) -> None:
        shape = trace.shape
        slots = min(slots, shape.layers * shape.experts)
        self.trace, self.link, self.times = trace, link, times
        self.policies = policies.make(
            CacheShape(layers=shape.layers, experts=shape.experts, top_k=shape.top_k, slots=slots)
        )
        pool = SlotPool(_layout(block_bytes), slots, torch.device("meta"))  # books without memory
        self.residency = Residency(
            pool, link, self.policies.eviction, RunStatistics(shape.layers), experts=shape.experts, keep=keep
        )
        self.flow = LayerFlow(self.residency, self.policies, trace.routes.view, carry=carry, tokens_ahead=tokens_ahead)
        chosen = self.policies
        needed = policies.prefetch.name != "none" or chosen.eviction.reads_forecasts or chosen.pre_eviction.active
        self._hints: Hints | None = trace.hints[predictor] if needed and predictor is not None else None
        self._until_request_s = [sum(parts) for parts in zip(times.before_s, times.request_s, strict=True)]
        self._expert_s = [seconds / shape.top_k for seconds in times.experts_s]

    def run(self, forward: Forward) -> float:
        """One forward; returns its seconds."""
        link, times, flow = self.link, self.times, self.flow
        start = link.now
        if forward.fresh:
            self.residency.abandon()
        flow.start_pass(forward.fresh)
        looks = flow.reads_logits or flow.decides
        for layer, keys in enumerate(forward.keys):
            link.spend(self._until_request_s[layer])
            precision: Mapping[int, str] | None = None
            if looks:
                keys, precision = self._look(layer, forward, keys)
            chunks = flow.begin(layer, keys, precision)
            self._hint(layer, forward)
            flow.finish(layer)
            link.spend(times.launch_s[layer])
            self._compute(layer, chunks, precision)
        link.spend(times.tail_s)
        return link.now - start + times.late_s

    def _compute(self, layer: int, chunks: list[list[int]], precision: Mapping[int, str] | None) -> None:
        residency, last = self.residency, len(chunks) - 1
        for index, chunk in enumerate(chunks):
            if index < last:
                residency.request(chunks[index + 1], precision)
            residency.wait(chunk)
            self.link.spend(self._expert_s[layer] * len(chunk))
            residency.release(chunk)

    def _look(self, layer: int, forward: Forward, keys: list[int]) -> tuple[list[int], Mapping[int, str] | None]:
        """The router's scores to those who read them, and what policies make of its choice: keys and precisions."""
        flow, routes, rows = self.flow, self.trace.routes, forward.rows
        logits_TE = routes.logits[layer][rows]
        if flow.reads_logits:
            flow.see(layer, routes.residual[layer][rows], logits_TE, forward.sequences)
        if not flow.decides:
            return keys, None
        decision = flow.decide(layer, logits_TE, routes.ids[layer][rows], routes.weights[layer][rows])
        if decision is None:
            return keys, None
        first = layer * self.trace.shape.experts
        return asked_for([first + expert for row in decision.ids_TK.tolist() for expert in row]), decision.precision

    def _hint(self, layer: int, forward: Forward) -> None:
        hints = self._hints
        if hints is None or forward.fresh:
            return
        made = hints.forecasts.get(layer + hints.ahead)
        if made is None:
            return
        self.link.spend(self.times.forecast_s[layer] + self.times.prefetch_s[layer])
        rows = forward.rows
        forecast = Forecast(
            layer=made.layer,
            logits_TE=made.logits_TE[rows],
            topk_ids_TK=made.topk_ids_TK[rows],
            topk_weights_TK=made.topk_weights_TK[rows],
        )
        self.flow.hint(forecast, forecast.topk_ids_TK.tolist(), forecast.topk_weights_TK.tolist())


def simulate(
    trace: Trace,
    policies: Policies,
    slots: int,
    machine: Machine,
    *,
    predictor: str | None = None,
    tokens_ahead: Callable[[], TokenForecasts] | None = None,
) -> Simulation:
    """Run a whole trace.

    Lossy policies change what is loaded and computed, not the recorded routing of later layers and tokens: what they
    cost in quality is measured with a model (:func:`expertcast.runtime.measure_quality`).

    Args:
        predictor: whose hints of the trace are given; None loads on demand.
        tokens_ahead: makes what an eviction policy looks ahead with.

    Raises:
        ExpertcastError: fewer slots than one token needs, a link without bandwidth.
    """
    check_slots(slots, trace.shape.top_k)
    looks_ahead = getattr(policies.eviction.cls, "reads_tokens", False)
    link = VirtualLink.of(
        machine.block_bytes,
        machine.bandwidth,
        machine.latency,
        expand_s=machine.expand_s,
        write_back=machine.write_back,
    )
    runtime = VirtualRuntime(
        trace, policies, slots, link, machine.times, block_bytes=machine.block_bytes[FULL],
        predictor=predictor,
        tokens_ahead=tokens_ahead() if tokens_ahead is not None and looks_ahead else None,
    )  # fmt: skip
    foretell(trace, runtime.policies.eviction)
    layers = trace.shape.layers
    done = Simulation(decode=RunStatistics(layers), prefill=RunStatistics(layers))
    for forward in trace.forwards:
        runtime.residency.stats = done.prefill if forward.fresh else done.decode
        (done.prefills_s if forward.fresh else done.steps_s).append(runtime.run(forward))
    return done


def _layout(block_bytes: int) -> BlockLayout:
    block = Field(name="block", shape=(block_bytes,), dtype=torch.uint8, offset=0)
    return BlockLayout(fields=(block,), block_bytes=block_bytes)
