"""Belady's bounds over a trace: forced admission is an eviction policy that knows the future, bypass is counted here.

L MoE layers, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

from expertcast.runtime.policies.eviction.belady import Belady, bypass_misses
from expertcast.runtime.policies.registry import CacheShape
from expertcast.runtime.policies.scope import Eviction, layer_shares
from expertcast.runtime.recording.statistics import LayerStatistics, RunStatistics
from expertcast.runtime.simulation.machine import Machine, Simulation
from expertcast.runtime.simulation.trace import Trace
from expertcast.runtime.storage.precision import FULL


def foretell(trace: Trace, eviction: Eviction) -> None:
    """Give policies that need the future all events that will come; one that rules over a layer gets that layer's."""
    events = [keys for forward in trace.forwards for keys in forward.keys]
    for index, policy in enumerate(eviction.policies):
        if isinstance(policy, Belady):
            policy.foresee(events if eviction.shares is None else events[index :: trace.shape.layers])


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
            _count(stats.layers[layer], len(keys), missed, missed * machine.block_bytes[FULL], waited)
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


def _count(stats: LayerStatistics, requests: int, misses: int, moved: int, waited_s: float) -> None:
    stats.requests += requests
    stats.misses += misses
    stats.hits += requests - misses
    stats.bytes_moved += moved
    stats.waited_s += waited_s
