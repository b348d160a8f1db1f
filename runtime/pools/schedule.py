"""Cache-affinity scheduling: in which order a layer's experts are read and decoded (ZipMoE, Algorithm 1; row E7).

Blocks follow one another. The base of each is an expert whose sign-mantissa plane must be read (Type I: M, E); it takes
experts whose plane is in memory (Type II: S, C), then more of Type I, until decoding lags so far behind the disk that
no thread would wait for the next block's shards. In a block shards are read before planes.

An expert is one tensor here, and how long it computes is left out: the runtime tells experts of a layer apart by
neither. Where the paper is mended: an expert that is in a block is in no later one, and those of Type II that no base
took make up the last block. The paper's "earliest position that adds no idle period" is no position: shards are alike
and nobody waits who has something to do, so idle periods depend on which experts a block holds, never on their order.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from expertcast.runtime.pools.states import Costs, State


def makespan(states: Sequence[State], blocks: Sequence[Sequence[int]], costs: Costs) -> float:
    """Seconds until all experts are there, with one disk and L threads that decode.

    Both are work-conserving (ZipMoE, appendix A): the disk reads the shards and then the planes of one block after
    another without a pause, and a free thread takes any shard that has been read. Shards are alike, so the end does not
    depend on which one that is.

    Args:
        states: of the layer's experts.
        blocks: places in `states`, of all experts but full ones.
        costs: of the operations.
    """
    clock, arrivals = 0.0, list[float]()
    for block in blocks:
        for state in (states[place] for place in block):
            for _ in range(costs.shards):
                clock += costs.shard_s * state.reads_exponents
                arrivals.append(clock if state.reads_exponents else 0.0)
        clock += costs.read_s * sum(states[place].reads_mantissas for place in block)
    free = [0.0] * costs.threads
    for arrival in sorted(arrivals):
        heapq.heapreplace(free, max(free[0], arrival) + costs.decode_s)
    return max(clock, *free)


def schedule(states: Sequence[State], costs: Costs) -> list[list[int]]:
    """The blocks of one layer: places in `states`. Full experts need nothing and are left out."""
    first = deque(place for place, state in enumerate(states) if state.reads_mantissas)
    second = deque(place for place, state in enumerate(states) if state.decodes and not state.reads_mantissas)
    blocks = []
    lag = Lag(costs, 0.0, [0.0] * costs.threads)
    while first:
        base = first.popleft()
        lag.add(states[base])
        taken: tuple[list[int], list[int]] = ([], [base])
        while (second or first) and not lag.large:
            place = (second or first).popleft()
            lag.add(states[place])
            taken[states[place].reads_mantissas].append(place)
        blocks.append(taken[0] + taken[1])
        lag = Lag(costs, lag.read, lag.free)
    return [*blocks, list(second)] if second else blocks


class Lag:
    """How far decoding is behind the disk at the end of a block, of which only the numbers of reads and shards matter.

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

    def add(self, state: State) -> None:
        """Take an expert into the block."""
        costs = self._costs
        if state.reads_exponents:
            self.read += costs.ratio * costs.read_s
            self._arrive(self._read + 1, self._read + costs.shards)
            self._read += costs.shards
        else:
            self._held += costs.shards
            self._free = list(self._before)
            for _ in range(self._held):
                heapq.heapreplace(self._free, self._free[0] + costs.decode_s)
            self._arrive(1, self._read)
        if state.reads_mantissas:
            self.read += costs.read_s

    @property
    def large(self) -> bool:
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
