"""How to keep experts that lie on a disk: compressed or not, with which pools beside the slots, or in memory after all.

Recorded routing is replayed in virtual time with what this machine was measured to take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from expertcast.data.routing import ABSENT, Routing
from expertcast.runtime.advising.advice import milliseconds
from expertcast.runtime.advising.disk_advice import DiskAdvice, DiskOption
from expertcast.runtime.links.virtual_disk import Stored
from expertcast.runtime.policies import Policies
from expertcast.runtime.pools.costs import Costs
from expertcast.runtime.pools.planner import Plan, plans
from expertcast.runtime.pools.ranks import rank_model
from expertcast.runtime.pools.replay import best_by_replay
from expertcast.runtime.pools.states import POOLS, ExpertBytes, State
from expertcast.runtime.recording.layer_times import LayerTimes
from expertcast.runtime.simulation.machine import Case, Machine, Simulation, no_times
from expertcast.runtime.simulation.simulator import simulate
from expertcast.runtime.simulation.trace import Trace
from expertcast.runtime.storage.precision import FULL

COMPRESS = 0.1
"""Share of raw's time per token that compressing must be expected to save before it is advised: what decoding takes
beside its own time, memory and processors that others use, is not in the event model."""
_STEP = 0.1
_REPLAYED = 8
"""Of the planner's allocations, how many are replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFindings:
    """What is known of model, machine and routing."""

    trace: Trace
    """That is replayed."""
    routing: str
    """Where it comes from."""
    times: LayerTimes
    """Of a decode step, waits left out."""
    slots: int
    """Experts that fit the memory."""
    block_bytes: int
    """Of one expert."""
    rate: float
    """Bytes per second of the disk."""
    rate_source: str
    """`given`, or what was measured."""
    stored: Stored | None
    """How the codec's experts lie there; None where it cannot hold them."""
    refused: str = ""
    """Why it cannot."""
    memory_copy_s: float | None = None
    """Seconds of one expert's copy out of memory; None where there is no room for all of them."""
    late: str | None = None
    """The codec of the run that `times.late_s` comes from; None: of no run from a disk."""


def advise_disk(found: DiskFindings) -> DiskAdvice:
    """What is fastest on demand, with compression only where it is expected to pay well."""
    raw = _option(found, Stored(plain=found.block_bytes), found.slots)
    options = [raw]
    if found.stored is not None:
        options.append(_option(found, found.stored, found.slots))
        options += _pooled(found, found.stored)
    if found.memory_copy_s is not None:
        options.append(_in_memory(found, found.memory_copy_s))
    plain = [option for option in options if option.codec == "raw"]
    chosen = min(plain, key=lambda option: option.tpot_s)
    best = min(options, key=lambda option: option.tpot_s)
    if best.tpot_s < (1 - COMPRESS) * chosen.tpot_s:
        chosen = best
    stored, shape = found.stored, found.trace.shape
    return DiskAdvice(
        chosen=chosen,
        options=options,
        reasons=_reasons(found, options, chosen),
        disk_rate=found.rate,
        disk_source=found.rate_source,
        decode_rate=None if stored is None or not stored.decoding_s else found.block_bytes / stored.decoding_s,
        decoders=1 if stored is None else stored.threads,
        stored_share=None if stored is None else (stored.plain + stored.mean_coded) / found.block_bytes,
        block_bytes=found.block_bytes,
        experts=shape.layers * shape.experts,
        memory_bytes=found.slots * found.block_bytes,
        routing=found.routing,
        tokens=found.trace.steps,
        layer_compute_s=found.times.compute_s,
        unexplained_s=found.times.late_s if found.late is not None else 0.0,
    )


def expected(found: DiskFindings, codec: str) -> DiskOption:
    """What the event model says of all memory in slots, with this codec or raw."""
    stored = found.stored if codec != "raw" and found.stored is not None else Stored(plain=found.block_bytes)
    return _option(found, stored, found.slots)


def routing_of(trace: Trace, source: str) -> Routing:
    """The same without a model: rows [T, L, K] of distinct experts, those of a forward one after another."""
    top_k, experts = trace.shape.top_k, trace.shape.experts
    rows, prompt = [], []
    for forward in trace.forwards:
        count = max(-(-len(keys) // top_k) for keys in forward.keys)
        ids_TLK = np.full((count, trace.shape.layers, top_k), ABSENT, dtype=np.int64)
        for layer, keys in enumerate(forward.keys):
            padded = np.full(count * top_k, ABSENT, dtype=np.int64)
            padded[: len(keys)] = np.array(keys) % experts
            ids_TLK[:, layer] = padded.reshape(count, top_k)
        rows.append(ids_TLK)
        prompt += [forward.fresh] * count
    return Routing(source=source, ids_TLK=np.concatenate(rows), prompt_T=np.array(prompt), experts=experts)


def _pooled(found: DiskFindings, stored: Stored) -> list[DiskOption]:
    """Slots and pools that share the memory: of the planner's first, the best by replay; several of them simulated."""
    shape = found.trace.shape
    if not stored.coded or not shape.top_k < found.slots < shape.layers * shape.experts:
        return []  # nothing to keep apart, or nothing is ever read twice
    routing = routing_of(found.trace, found.routing)
    size = ExpertBytes(plane=stored.plain, exponents=max(stored.coded))
    costs = Costs(
        read_s=stored.plain / found.rate,
        ratio=stored.mean_coded / stored.plain,
        decode_s=stored.decode_s,
        shards=stored.shards,
        threads=stored.threads,
    )
    memory = (found.slots - shape.top_k) * found.block_bytes // shape.layers  # a token's slots are no pool
    planned = [
        plan
        for plan in plans(rank_model(routing), costs, size=size, memory=memory, step=_STEP)
        # prompts take turns in the slots, which decode steps do not show: a full expert of each layer at the least
        if plan.experts[State.F] and any(plan.experts[state] for state in POOLS[1:])
    ][:_REPLAYED]
    if not planned:
        return []
    best = best_by_replay(planned, routing, costs, size=size)
    options = [_of_plan(found, stored, plan) for plan in (best, *(plan for plan in planned[:2] if plan is not best))]
    return [min(options, key=lambda option: option.tpot_s)]


def _of_plan(found: DiskFindings, stored: Stored, plan: Plan) -> DiskOption:
    shape = found.trace.shape
    pools = {state: shape.layers * plan.memory[state] for state in POOLS[1:] if plan.memory[state]}
    return _option(found, replace(stored, pools=pools), shape.layers * plan.experts[State.F] + shape.top_k)


def _option(found: DiskFindings, stored: Stored, slots: int) -> DiskOption:
    machine = Machine(
        times=_times(found, coded=bool(stored.coded)), block_bytes={FULL: found.block_bytes}, bandwidth=found.rate,
        stored=stored, prefill=no_times(found.trace.shape.layers),
    )  # fmt: skip
    done = _simulated(found.trace, machine, slots)
    return DiskOption(
        store="disk", codec=stored.codec, pools=stored.pools_text, slots=slots, tpot_s=done.tpot_s,
        wait_s=done.wait_s, hit_rate=done.hit_rate, read_per_token=done.bytes_read / len(done.steps_s),
    )  # fmt: skip


def _in_memory(found: DiskFindings, copy_s: float) -> DiskOption:
    machine = Machine(
        times=replace(found.times, late_s=0.0), block_bytes={FULL: found.block_bytes},
        bandwidth=found.block_bytes / copy_s, blocking=True, prefill=no_times(found.trace.shape.layers),
    )  # fmt: skip
    done = _simulated(found.trace, machine, found.slots)
    return DiskOption(
        store="memory", slots=found.slots, tpot_s=done.tpot_s, wait_s=done.wait_s, hit_rate=done.hit_rate,
        read_per_token=0.0,
    )  # fmt: skip


def _simulated(trace: Trace, machine: Machine, slots: int) -> Simulation:
    return simulate(trace, Case(policies=Policies(prefetch="none"), slots=slots, machine=machine), waits=True)


def _times(found: DiskFindings, *, coded: bool) -> LayerTimes:
    """What a short run took beyond the event model counts for runs of its own kind; of a raw one, for compressed ones
    too, which do no less."""
    if found.late is not None and (coded or found.late == "raw"):
        return found.times
    return replace(found.times, late_s=0.0)


def _reasons(found: DiskFindings, options: Sequence[DiskOption], chosen: DiskOption) -> list[str]:
    raw, *others = options
    shape = found.trace.shape
    if found.slots >= shape.layers * shape.experts:
        return [
            f"all {shape.layers * shape.experts} experts fit the slots: each is read once, so leave them as they are"
        ]
    reasons = [f"codec raw waits {milliseconds(raw.wait_s)} of {milliseconds(raw.tpot_s)} per token for the disk"]
    for option in others:
        change = option.tpot_s / raw.tpot_s - 1
        reasons.append(f"{option.name} would take {milliseconds(option.tpot_s)} per token: {change:+.0%}")
    coded = [option for option in options if option.codec != "raw"]
    if found.stored is None:
        reasons.append(found.refused)
    elif coded and chosen not in coded:
        best = min(coded, key=lambda option: option.tpot_s)
        reasons.append(_why_not(found, found.stored, chosen, best))
    return reasons


def _why_not(found: DiskFindings, stored: Stored, chosen: DiskOption, best: DiskOption) -> str:
    read_s, coded_s = found.block_bytes / found.rate, (stored.plain + stored.mean_coded) / found.rate
    decoding_s = stored.decoding_s / stored.threads
    if decoding_s >= read_s:
        return (
            f"do not compress: decoding an expert takes {milliseconds(decoding_s)}, reading it uncompressed "
            f"{milliseconds(read_s)}"
        )
    gain = 1 - best.tpot_s / chosen.tpot_s
    saved = f"an expert is read in {milliseconds(coded_s)} in place of {milliseconds(read_s)}"
    if gain <= 0:
        return f"do not compress: {saved}, and decoding costs a token more than that saves"
    return (
        f"do not compress: {saved}, which saves {gain:.0%} of a token here; less than {COMPRESS:.0%} is not relied on"
    )
