"""Simulator: the runtime's flow, cache and policies in virtual time, over a link that counts seconds.

A layer passes the same events as in :class:`expertcast.runtime.engine.engine.Engine`:

    compute     | before | forecast | wait ... | experts |
    link                 [ miss ][ miss ][ forecast ][ forecast ] ...

T tokens, L MoE layers, E routed experts per layer, K experts per token. The key of an expert is layer * E + expert.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from expertcast.runtime.engine.cache import ExpertCache
from expertcast.runtime.engine.engine import LayerFlow
from expertcast.runtime.policies.base import CacheShape, check_slots
from expertcast.runtime.policies.eviction import PROMPT_ROWS, Belady
from expertcast.runtime.recording.recorder import RunStatistics
from expertcast.runtime.simulation.machine import Case, Simulation
from expertcast.runtime.simulation.trace import Forward, Hints, Trace, request_order
from expertcast.runtime.storage.layout import FULL, BlockLayout, Field
from expertcast.runtime.storage.slots import SlotPool


class VirtualRuntime:
    """Slots, link, flow and clock of one simulated run.

    Args:
        trace: recorded routing and forecasts.
        case: policies, slots and machine.

    Raises:
        ExpertcastError: a policy reads more than the trace holds.
    """

    def __init__(self, trace: Trace, case: Case) -> None:
        shape, machine, self.trace = trace.shape, case.machine, trace
        slots = min(case.slots, shape.layers * shape.experts)
        cache = CacheShape(layers=shape.layers, experts=shape.experts, top_k=shape.top_k, slots=slots)
        self.policies = policies = case.policies.make(cache)
        self.link = machine.link()
        full = machine.block_bytes[FULL]
        block = Field(name="block", shape=(full,), dtype=torch.uint8, offset=0)
        layout = BlockLayout(fields=(block,), block_bytes=full)
        pool = SlotPool(layout, slots, torch.device("meta"))  # allocates no memory
        self.residency = ExpertCache(
            pool, self.link, policies.eviction, RunStatistics(shape.layers), experts=shape.experts, keep=case.cache
        )
        source: Hints | None = None if case.predictor is None else trace.hints[case.predictor]
        self.flow = LayerFlow(self.residency, policies, shape, view=None if trace.routes is None else trace.routes.view)
        self._routes = trace.require_routes() if self.flow.reads_scores or self.flow.decides else None
        early = case.policies.prefetch.name != "none" or policies.pre_eviction.active
        self._forecasts = source if early or policies.eviction.reads_forecasts else None
        self._times = machine.times
        self._smaller = frozenset(name for name, size in machine.block_bytes.items() if size < full)
        """Precisions below that of the stored experts; copies in another are copies of the stored experts."""

    def run(self, forward: Forward) -> float:
        """Run one step and return its seconds."""
        link, flow, times, top_k = self.link, self.flow, self._times, self.trace.shape.top_k
        start, hints = link.now, self._forecasts
        if forward.fresh:
            self.residency.abandon()
        flow.start_pass(forward.fresh)
        shows_routing = forward.fresh and self.trace.routes is not None and self.policies.eviction.reads_routing
        for layer, keys in enumerate(forward.keys):
            link.spend(times.before_s[layer])
            precision: Mapping[int, str] | None = None
            if self._routes is not None:
                keys, precision = self._route(layer, forward, keys)
            if shows_routing:
                rows_TK = self.trace.require_routes().ids[layer][forward.rows]
                self.policies.eviction.by_layer[layer].see_routing(layer, rows_TK[-PROMPT_ROWS:].tolist())
            chunks = flow.begin(layer, keys, precision, decodes=not forward.fresh)
            if hints is not None and not forward.fresh and hints.due(layer, forward):
                link.spend(times.forecast_s[layer])
                hints.submit(layer, forward, flow)
            flow.finish(layer)
            self._compute(layer, times.experts_s[layer] / top_k, chunks, precision)
        return link.now - start

    def _compute(
        self, layer: int, expert_s: float, chunks: list[list[int]], precision: Mapping[int, str] | None
    ) -> None:
        """Compute the experts of a layer.

        Args:
            layer: the layer.
            expert_s: seconds per expert.
            chunks: keys of each chunk; the first chunk is requested already.
            precision: precision of the experts that are not loaded in full.
        """
        residency, last = self.residency, len(chunks) - 1
        beside = residency.limit(layer) > 1
        for index, chunk in enumerate(chunks):
            if index and not beside:
                residency.request(chunk, precision)
            if beside and index < last:
                residency.request(chunks[index + 1], precision)
            elif index == last > 0:
                self.flow.stream(layer)
            residency.wait(chunk)
            self.link.spend(expert_s * len(chunk))
            residency.release(chunk)

    def _route(self, layer: int, forward: Forward, keys: list[int]) -> tuple[list[int], Mapping[int, str] | None]:
        """Pass the router's scores to the policies and return the keys and precisions that they decide on."""
        flow, routes, rows = self.flow, self._routes, forward.rows
        assert routes is not None
        logits_TE = routes.logits[layer][rows]
        if flow.reads_scores:
            flow.see(layer, logits_TE)
        if not flow.decides:
            return keys, None
        decision = flow.decide(layer, logits_TE, routes.ids[layer][rows], routes.weights[layer][rows])
        if not decision.changed:
            return keys, None
        first = layer * self.trace.shape.experts
        precision = {key: name if name in self._smaller else FULL for key, name in decision.precision.items()}
        return request_order([first + expert for row in decision.ids for expert in row]), precision


def simulate(trace: Trace, case: Case) -> Simulation:
    """Simulate a trace in virtual time.

    Lossy policies change what is loaded and computed, but not the recorded routing of later layers and tokens. Their
    effect on quality needs a model: :func:`expertcast.runtime.quality.measure_policies`.

    Args:
        trace: recorded routing, with forecasts.
        case: policies, slots and machine.

    Returns:
        Counts and times of prefills and decode steps.

    Raises:
        ExpertcastError: there are fewer slots than one token needs, the bandwidth is not positive, or a policy reads
            more than the trace holds.

    Example:
        >>> from expertcast.predictors.view import ModelShape
        >>> from expertcast.runtime.policies import Policies
        >>> from expertcast.runtime.simulation.machine import Case, Machine, constant_times
        >>> from expertcast.runtime.simulation.simulator import simulate
        >>> from expertcast.runtime.simulation.trace import Forward, Trace
        >>> keys = [[[0, 1], [4, 5]], [[0, 1], [4, 5]], [[0, 2], [4, 5]]]  # forward, layer: keys layer * 4 + expert
        >>> forwards = [Forward(fresh=index == 0, rows=slice(index, index + 1), keys=each)
        ...             for index, each in enumerate(keys)]
        >>> shape = ModelShape(layers=2, hidden=8, experts=4, top_k=2)
        >>> machine = Machine(times=constant_times(2, 1e-3), block_bytes={"full": 1_000_000}, bandwidth=1e9)
        >>> policies = Policies(eviction="lru", prefetch="none")
        >>> result = simulate(Trace(shape=shape, forwards=forwards), Case(policies=policies, slots=4, machine=machine))
        >>> result.decode.total.hits, result.decode.total.misses
        (7, 1)
    """
    check_slots(case.slots, trace.shape.top_k)
    runtime = VirtualRuntime(trace, case)
    events, policies = [keys for forward in trace.forwards for keys in forward.keys], runtime.policies.eviction.policies
    for index, policy in enumerate(policies):
        if isinstance(policy, Belady):
            policy.set_future(events[index :: len(policies)])  # a policy of one layer receives the events of its layer
    layers = trace.shape.layers
    done = Simulation(decode=RunStatistics(layers), prefill=RunStatistics(layers))
    for forward in trace.forwards:
        stats = done.prefill if forward.fresh else done.decode
        runtime.residency.stats = stats
        if forward.fresh:
            done.prefills_s.append(runtime.run(forward))
        else:
            began = time.process_time()
            done.steps_s.append(runtime.run(forward))
            done.policy_s.append(time.process_time() - began)
    return done
