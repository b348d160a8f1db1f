"""Cache-affinity scheduling: in which order a layer's experts are read and decoded (ZipMoE, Algorithm 1; row E7).

Blocks follow one another. The base of each is a tensor whose sign-mantissa plane must be read (Type I: M, E); it takes
tensors whose plane is in memory (Type II: S, C), then more of Type I, until decoding lags so far behind the disk that
no thread would wait for the next block's shards. In a block shards are read before planes.

Where the paper is mended: a tensor that is in a block is in no later one, and tensors of Type II that no base took make
up the last block. The paper's "earliest position that adds no idle period" is no position: shards are alike and nobody
waits who has something to do, so idle periods depend on which tensors a block holds, never on their order. What is left
of the rule is the order by computing time, Type II first, which was never worse in the mean than to put a tensor that
adds an idle period behind the base.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from expertcast.runtime.pools.states import Costs, State


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
    """How long an order takes on one disk, L threads that decode, and one stream that computes.

    All of them are work-conserving (ZipMoE, appendix A): the disk reads without a pause in the order given, a free
    thread takes the first shard in the order of decoding that has been read, and an expert is computed, one at a time,
    when all of its tensors are there.
    """
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


def schedule(tasks: Sequence[Task], costs: Costs) -> Order:
    """The order for one layer; tasks in state F need nothing and are left out."""
    ranked = sorted(range(len(tasks)), key=lambda task: (-tasks[task].compute_s, tasks[task].expert))
    first = deque(task for task in ranked if tasks[task].state.reads_mantissas)
    second = deque(task for task in ranked if tasks[task].state.decodes and not tasks[task].state.reads_mantissas)
    order = Order([], [])
    block = Block(costs, 0.0, [0.0] * costs.threads)
    while first:
        base = first.popleft()
        block.add(tasks[base])
        kinds: tuple[list[int], list[int]] = ([], [base])
        while (second or first) and not block.decoding_lags:
            task = (second or first).popleft()
            block.add(tasks[task])
            kinds[tasks[task].state.reads_mantissas].append(task)
        _append(order, tasks, kinds[0] + kinds[1], costs.shards)
        block = Block(costs, block.read, block.free)
    _append(order, tasks, list(second), costs.shards)
    return order


def _append(order: Order, tasks: Sequence[Task], block: Sequence[int], shards: int) -> None:
    """A block: its shards, then its planes."""
    order.decodes.extend(block)
    for task in block:
        if tasks[task].state.reads_exponents:
            order.reads.extend([Read(task, exponents=True)] * shards)
    order.reads.extend(Read(task, exponents=False) for task in block if tasks[task].state.reads_mantissas)


class Block:
    """When disk and threads are done with a block, of which only the numbers of reads and shards matter.

    Args:
        costs: of the operations.
        start: when the disk is done with the block before.
        free: when each thread is, sorted.
    """

    def __init__(self, costs: Costs, start: float, free: list[float]) -> None:
        self._costs, self._start, self._before = costs, start, free
        self._held = self._read = 0
        """Shards that are in memory already, and that are read."""
        self.read = start
        """When the disk is done."""
        self._free = list(free)

    @property
    def free(self) -> list[float]:
        """When each thread is done, sorted."""
        return sorted(self._free)

    def add(self, task: Task) -> None:
        """Take a tensor in."""
        costs = self._costs
        if task.state.reads_exponents:
            self.read += costs.ratio * costs.read_s
            self._arrive(self._read + 1, self._read + costs.shards)
            self._read += costs.shards
        else:
            self._held += costs.shards
            self._free = list(self._before)
            for _ in range(self._held):
                heapq.heapreplace(self._free, self._free[0] + costs.decode_s)
            self._arrive(1, self._read)
        if task.state.reads_mantissas:
            self.read += costs.read_s

    @property
    def decoding_lags(self) -> bool:
        """Whether the l-th thread to be free, for all l up to K and L, is free no sooner than the l-th shard of the
        next block can have been read (main text's "compute-bound"; row E8)."""
        many = min(self._costs.threads, self._costs.shards)
        return all(
            free - self.read >= count * self._costs.shard_s for count, free in enumerate(self.free[:many], start=1)
        )

    def _arrive(self, first: int, last: int) -> None:
        """Decode the block's shards with these numbers, each from when it has been read."""
        costs, free = self._costs, self._free
        for number in range(first, last + 1):
            heapq.heapreplace(free, max(free[0], self._start + number * costs.shard_s) + costs.decode_s)
