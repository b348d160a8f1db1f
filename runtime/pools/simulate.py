"""What an order of reads and decodings takes: one disk, L threads that decode, and one stream that computes.

Nobody waits who has something to do: the disk reads without a pause in the order given, a free thread takes the first
shard in the order of decoding that has been read, and an expert is computed, one at a time, when all of its tensors are
there (ZipMoE, appendix A, "work-conserving").
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from expertcast.runtime.pools.costs import Costs
from expertcast.runtime.pools.states import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One tensor of an expert that a layer waits for."""

    expert: int
    state: State
    compute_s: float = 0.0
    """p: of the whole expert, the same for all of its tensors."""


@dataclass(frozen=True, slots=True)
class Read:
    """One request to the disk."""

    task: int
    """Place in the list of tasks."""
    exponents: bool
    """One shard of the exponents; otherwise the sign-mantissa plane."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is read and decoded, first to last. A task's shards are alike: each is read once, and decoded once."""

    reads: list[Read]
    decodes: list[int]
    """Tasks; a thread takes a shard of the first one that has any."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds from the start."""

    makespan: float
    """When the last expert has been computed."""
    read: float
    """When the last read ends."""
    decoded: float
    """When the last shard has been decoded."""
    ready: dict[int, float]
    """When all tensors of each expert are there."""


def simulate(tasks: Sequence[Task], order: Order, costs: Costs) -> Times:
    """How long it takes."""
    clock = 0.0
    ready = [0.0] * len(tasks)
    place = {task: rank for rank, task in enumerate(order.decodes)}
    waiting = [
        rank
        for task, rank in place.items()
        if tasks[task].state.decodes and not tasks[task].state.reads_exponents
        for _ in range(costs.shards)
    ]
    arrivals: list[tuple[float, int]] = []
    for read in order.reads:
        clock += costs.shard_s if read.exponents else costs.read_s
        if read.exponents:
            arrivals.append((clock, place[read.task]))
        else:
            ready[read.task] = clock
    decoded = 0.0
    for rank, end in _decoded(waiting, arrivals, costs):
        decoded = max(decoded, end)
        task = order.decodes[rank]
        ready[task] = max(ready[task], end)
    experts: dict[int, float] = {}
    for tensor, end in zip(tasks, ready, strict=True):
        experts[tensor.expert] = max(end, experts.get(tensor.expert, 0.0))
    seconds = {task.expert: task.compute_s for task in tasks}
    makespan = 0.0
    for expert in sorted(experts, key=experts.__getitem__):
        makespan = max(makespan, experts[expert]) + seconds[expert]
    return Times(makespan, clock, decoded, experts)


def _decoded(waiting: list[int], arrivals: list[tuple[float, int]], costs: Costs) -> list[tuple[int, float]]:
    """Rank and end of each shard's decoding.

    Args:
        waiting: ranks of shards that are there from the start.
        arrivals: time and rank of those that are read, in the order of times.
    """
    free = [0.0] * costs.threads
    ends = []
    heapq.heapify(waiting)
    come = 0
    while waiting or come < len(arrivals):
        now = free[0]
        if not waiting:
            now = max(now, arrivals[come][0])
        while come < len(arrivals) and arrivals[come][0] <= now:
            heapq.heappush(waiting, arrivals[come][1])
            come += 1
        end = now + costs.decode_s
        heapq.heapreplace(free, end)
        ends.append((heapq.heappop(waiting), end))
    return ends
