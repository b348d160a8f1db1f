"""A runtime in virtual time: the flow, the books and the policies of the real one over a link that counts seconds.

A layer goes through the same events as in :class:`expertcast.runtime.engine.engine.HostEngine`:

    compute     | before | request | forecast | prefetch | launch | wait ... | experts |
    link                           [ miss ][ miss ][ forecast ][ forecast ] ...

T tokens, L MoE layers, E routed experts per layer, K experts per token. An expert's key is layer * E + expert.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from expertcast.runtime.engine.cache import ExpertCache
from expertcast.runtime.engine.engine import LayerFlow
from expertcast.runtime.links.virtual import VirtualDisk
from expertcast.runtime.policies.base import CacheShape
from expertcast.runtime.policies.belady import Belady, bypass_misses
from expertcast.runtime.policies.eviction import PROMPT_ROWS, Eviction, PoolEviction, layer_shares
from expertcast.runtime.recording.recorder import LayerTimes
from expertcast.runtime.recording.statistics import RunStatistics
from expertcast.runtime.simulation.machine import Case, Machine, Simulation, check_slots
from expertcast.runtime.simulation.trace import ForecastSource, Forward, ReplayedTokens, Trace, asked_for
from expertcast.runtime.storage.layout import FULL, BlockLayout, Field
from expertcast.runtime.storage.slots import SlotPool


def foretell(trace: Trace, eviction: Eviction) -> None:
    """Give policies that need the future all events that will come; one that rules over a layer gets that layer's."""
    events = [keys for forward in trace.forwards for keys in forward.keys]
    for index, policy in enumerate(eviction.policies):
        if isinstance(policy, Belady):
            policy.set_future(events if eviction.shares is None else events[index :: trace.shape.layers])


def simulate_bypass(trace: Trace, slots: int, machine: Machine, scope: str = "global") -> Simulation:
    """The fewest misses of any policy that loads on demand and need not keep what it has just used.

    Times are of a layer that asks for its misses, waits for them all and computes.

    Args:
        trace: what the routers say.
        slots: experts that fit on the device.
        machine: what computes and what copies.
        scope: who shares the slots, as in :class:`expertcast.runtime.policies.Policies`.
    """
    layers = trace.shape.layers
    misses = _misses(trace, slots, scope)
    times, copy_s = machine.times, machine.copy_s
    done = Simulation(decode=RunStatistics(layers), prefill=RunStatistics(layers))
    for index, forward in enumerate(trace.forwards):
        stats = done.prefill if forward.fresh else done.decode
        seconds = times.tail_s + times.late_s
        for layer, keys in enumerate(forward.keys):
            missed = misses[index * layers + layer]
            waited = max(0.0, missed * copy_s - times.launch_s[layer])
            counts = stats.layers[layer]
            counts.requests += len(keys)
            counts.misses += missed
            counts.hits += len(keys) - missed
            counts.bytes_moved += missed * machine.block_bytes[FULL]
            counts.waited_s += waited
            seconds += times.before_s[layer] + times.request_s[layer] + times.launch_s[layer] + waited
            seconds += times.experts_s[layer] / trace.shape.top_k * len(keys)
        (done.prefills_s if forward.fresh else done.steps_s).append(seconds)
    return done


def _misses(trace: Trace, slots: int, scope: str) -> list[int]:
    """Of each event of each forward."""
    shape = trace.shape
    events = [keys for forward in trace.forwards for keys in forward.keys]
    cache = CacheShape(layers=shape.layers, experts=shape.experts, top_k=shape.top_k, slots=slots)
    if scope == "global":
        return bypass_misses(events, slots)
    misses = [0] * len(events)
    for layer, share in enumerate(layer_shares(cache)):
        misses[layer :: shape.layers] = bypass_misses(events[layer :: shape.layers], share)
    return misses


_Costs = tuple[list[float], list[float], list[float], list[float], float]
"""Seconds of the model's thread: per layer until the request, for asking for a forecast, for the launch and for each
expert; and after the last layer."""


class VirtualRuntime:
    """Slots, link, flow and clock of one run.

    Raises:
        ExpertcastError: policies that read more than the trace holds.
    """

    def __init__(self, trace: Trace, case: Case) -> None:
        shape, machine, self.trace = trace.shape, case.machine, trace
        slots = min(case.slots, shape.layers * shape.experts)
        self.policies = policies = case.policies.make(
            CacheShape(layers=shape.layers, experts=shape.experts, top_k=shape.top_k, slots=slots)
        )
        tokens_ahead = None
        if trace.tokens_ahead is not None and policies.eviction.reads_tokens:
            tokens_ahead = ReplayedTokens(trace.tokens_ahead)
        self.link = machine.link()
        pool = SlotPool(_layout(machine.block_bytes[FULL]), slots, torch.device("meta"))  # books without memory
        if isinstance(self.link, VirtualDisk):
            self.link.keep_parts(pool, shape, passing=1 if case.predictor is None and tokens_ahead is None else 2)
        if self.link.pools is not None:
            policies.eviction = Eviction.from_policy(PoolEviction(self.link.pools), shape.layers)
        self.residency = ExpertCache(
            pool, self.link, policies.eviction, RunStatistics(shape.layers), experts=shape.experts, keep=case.cache
        )
        source: ForecastSource | None = None if case.predictor is None else trace.hints[case.predictor]
        carries = source is not None and case.carry and not case.cache
        self.flow = LayerFlow(
            self.residency, policies, shape,
            view=None if trace.routes is None else trace.routes.view,
            carry=source.ahead if source is not None and carries else 0,
            tokens_ahead=tokens_ahead,
        )  # fmt: skip
        self._routes = trace.known_routes() if self.flow.reads_logits or self.flow.decides else None
        early = case.policies.prefetch.name != "none" or policies.pre_eviction.active
        self._forecasts = source if early or policies.eviction.reads_forecasts else None
        self._carries_at = shape.layers - 1 if carries else -1
        """The layer that asks on behalf of the next token."""
        self._decode = _costs(machine.times, shape.top_k)
        self._prefill = _costs(machine.prefill or machine.times, shape.top_k)
        self._late_s = machine.times.late_s

    def run(self, forward: Forward) -> float:
        """One forward; returns its seconds."""
        link, flow = self.link, self.flow
        until_request_s, ask_s, launch_s, expert_s, end_s = self._prefill if forward.fresh else self._decode
        start = link.now
        if forward.fresh:
            self.residency.abandon()
        flow.start_pass(forward.fresh, None if flow.tokens_ahead is None else self.trace.token_ids(forward))
        told = forward.fresh and self.trace.routes is not None and self.policies.eviction.reads_routing
        for layer, keys in enumerate(forward.keys):
            link.spend(until_request_s[layer])
            precision: Mapping[int, str] | None = None
            if self._routes is not None:
                keys, precision = self._look(layer, forward, keys)
            if told:
                self._tell(layer, forward)
            chunks = flow.begin(layer, keys, precision)
            if self._forecasts is not None and not forward.fresh:
                self._ask(self._forecasts, layer, forward, ask_s[layer])
            flow.finish(layer)
            link.spend(launch_s[layer])
            self._compute(layer, expert_s[layer], chunks, precision)
        link.spend(end_s)
        return link.now - start + self._late_s

    def _compute(
        self, layer: int, expert_s: float, chunks: list[list[int]], precision: Mapping[int, str] | None
    ) -> None:
        """A layer's experts run.

        Args:
            layer: whose they are.
            expert_s: seconds of one expert.
            chunks: keys, of which the first have been requested.
            precision: of those that need not come in full.
        """
        residency, last = self.residency, len(chunks) - 1
        for index, chunk in enumerate(chunks):
            if index < last:
                residency.request(chunks[index + 1], precision)
            elif last:
                self.flow.stream(layer)
            residency.wait(chunk)
            self.link.spend(expert_s * len(chunk))
            residency.release(chunk)

    def _look(self, layer: int, forward: Forward, keys: list[int]) -> tuple[list[int], Mapping[int, str] | None]:
        """The router's scores to those who read them, and what policies make of its choice: keys and precisions."""
        flow, routes, rows = self.flow, self._routes, forward.rows
        assert routes is not None
        logits_TE = routes.logits[layer][rows]
        if flow.reads_logits:
            flow.see(layer, routes.residual[layer][rows], logits_TE, forward.sequences)
        if not flow.decides:
            return keys, None
        decision = flow.decide(layer, logits_TE, routes.ids[layer][rows], routes.weights[layer][rows])
        if not decision.changed:
            return keys, None
        first = layer * self.trace.shape.experts
        return asked_for([first + expert for row in decision.ids for expert in row]), decision.precision

    def _tell(self, layer: int, forward: Forward) -> None:
        """What each token of a prompt was given, to a policy that reads it."""
        rows_TK = self.trace.known_routes().ids[layer][forward.rows]
        self.policies.eviction.see_routing(layer, rows_TK[-PROMPT_ROWS:].tolist())

    def _ask(self, forecasts: ForecastSource, layer: int, forward: Forward, ask_s: float) -> None:
        """A decode step's forecast takes its time, as does what the last layer asks for on the next token's behalf."""
        due = forecasts.due(layer, forward)
        if due or layer == self._carries_at:
            self.link.spend(ask_s)
        if due:
            forecasts.ask(layer, forward, self.flow)


def simulate(trace: Trace, case: Case, *, waits: bool = False) -> Simulation:
    """Run a whole trace.

    Lossy policies change what is loaded and computed, not the recorded routing of later layers and tokens: what they
    cost in quality is measured with a model (:func:`expertcast.runtime.measure_quality`).

    Args:
        trace: what the routers say, and forecasts of it.
        case: how it is run.
        waits: keep how long each layer of each decode step waited.

    Raises:
        ExpertcastError: fewer slots than one token needs, a link without bandwidth, or policies that read more than the
            trace holds.
    """
    check_slots(case.slots, trace.shape.top_k)
    if case.bypass:
        return simulate_bypass(trace, case.slots, case.machine, case.policies.scope)
    runtime = VirtualRuntime(trace, case)
    foretell(trace, runtime.policies.eviction)
    layers = trace.shape.layers
    done = Simulation(decode=RunStatistics(layers), prefill=RunStatistics(layers))
    waited_s = [0.0] * layers
    for forward in trace.forwards:
        stats = done.prefill if forward.fresh else done.decode
        if runtime.residency.stats is not stats:
            runtime.residency.stats = stats
        read = runtime.link.bytes_read
        if forward.fresh:
            done.prefills_s.append(runtime.run(forward))
            done.prefill_bytes_read += runtime.link.bytes_read - read
        else:
            done.steps_s.append(runtime.run(forward))
            done.bytes_read += runtime.link.bytes_read - read
        if waits and not forward.fresh:
            so_far_s, waited_s = waited_s, [layer.waited_s for layer in done.decode.layers]
            done.waits_s.append([now - before for now, before in zip(waited_s, so_far_s, strict=True)])
    return done


def _costs(times: LayerTimes, top_k: int) -> _Costs:
    return (
        [sum(parts) for parts in zip(times.before_s, times.request_s, strict=True)],
        [sum(parts) for parts in zip(times.forecast_s, times.prefetch_s, strict=True)],
        times.launch_s,
        [seconds / top_k for seconds in times.experts_s],
        times.tail_s,
    )


def _layout(block_bytes: int) -> BlockLayout:
    block = Field(name="block", shape=(block_bytes,), dtype=torch.uint8, offset=0)
    return BlockLayout(fields=(block,), block_bytes=block_bytes)
