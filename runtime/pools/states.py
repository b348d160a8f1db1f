"""States of an expert in memory, with the operations that each still needs and its bytes, and their schedule.

A bf16 tensor is stored on disk as two planes of one byte per element: signs and mantissas, uncompressed, and exponents,
compressed in K shards.

Source: ZipMoE, section 3.2 and Figure 6.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs of one disk and several decoding threads, with the symbols of ZipMoE (section 3.3)."""

    read_s: float
    """u: seconds to read the sign-mantissa plane of one expert."""
    ratio: float
    """rho: compressed size of the exponents as a share of their plane."""
    decode_s: float
    """c: seconds to decode one shard of an expert and to rebuild its part of the expert."""
    shards: int = 1
    """K: number of shards per expert."""
    threads: int = 1
    """L: number of decoding threads."""

    @property
    def shard_s(self) -> float:
        """v = rho u / K: seconds to read one shard."""
        return self.ratio * self.read_s / self.shards


class State(Enum):
    """Parts of an expert that are in memory, ordered by the work that remains."""

    F = "full"
    C = "compressed"
    S = "mantissas"
    E = "exponents"
    M = "missing"

    __hash__ = object.__hash__  # members are unique; Enum's own hash is a slow Python call at every lookup

    @property
    def reads_mantissas(self) -> bool:
        """Whether the sign-mantissa plane must be read: true for Type I (E, M), false for Type II (C, S)."""
        return self is State.E or self is State.M

    @property
    def reads_exponents(self) -> bool:
        """Whether the shards must be read."""
        return self is State.S or self is State.M

    @property
    def decodes(self) -> bool:
        """Whether shards must be decoded."""
        return self is not State.F


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertBytes:
    """Bytes of the parts of one expert, about the same for all experts of a model."""

    plane: int
    """Signs and mantissas: half of the expert."""
    exponents: int
    """Compressed exponents, all shards."""

    def held(self, state: State) -> int:
        """Return the bytes that an expert takes in a state."""
        planes = {State.F: 2, State.C: 1, State.S: 1}.get(state, 0)
        return planes * self.plane + self.exponents * (state in (State.C, State.E))


POOLS = (State.F, State.C, State.S, State.E)
"""States that have a pool, hottest first."""


def pools_text(memory: Mapping[State, int]) -> str:
    """Return the text form of the pools other than F, such as `C=2000000,E=300000`, in bytes."""
    return ",".join(f"{state.name}={memory[state]}" for state in POOLS if state is not State.F and memory.get(state))


# Cache-affinity scheduling: the order in which the experts of a layer are read and decoded.
#
# The schedule is a sequence of blocks. Each block starts with an expert whose sign-mantissa plane must be read (Type I:
# states M and E). It then adds experts whose plane is in memory (Type II: S and C), then more of Type I, until decoding
# lags so far behind the disk that no thread would wait for the shards of the next block. Within a block, shards are
# read before planes.
#
# Source: ZipMoE, Algorithm 1, with these changes: an expert is one tensor, and its computing time is left out; an
# expert belongs to one block only; experts of Type II that remain form the last block. Idle periods depend on the
# experts of a block and not on their order: the paper's rule for a position within the block is not used.


def schedule(states: Sequence[State], costs: Costs) -> list[list[int]]:
    """Return the blocks of one layer as indices in `states`; full experts are left out.

    Args:
        states: states of the layer's experts.
        costs: seconds per operation.
    """
    first = deque(place for place, state in enumerate(states) if state.reads_mantissas)
    second = deque(place for place, state in enumerate(states) if state.decodes and not state.reads_mantissas)
    blocks = []
    lag = Lag(costs, 0.0, [0.0] * costs.threads)
    while first:
        base = first.popleft()
        lag.add(states[base])
        members: tuple[list[int], list[int]] = ([], [base])
        while (second or first) and not lag.large:
            place = (second or first).popleft()
            lag.add(states[place])
            members[states[place].reads_mantissas].append(place)
        blocks.append(members[0] + members[1])
        lag = Lag(costs, lag.read, lag.free)
    return [*blocks, list(second)] if second else blocks


class Lag:
    """Lag of decoding behind the disk at the end of a block.

    Args:
        costs: seconds per operation.
        start: time at which the disk finishes the previous block.
        free: sorted times at which the threads become free.
    """

    def __init__(self, costs: Costs, start: float, free: list[float]) -> None:
        self._costs, self._start, self._before = costs, start, free
        self._held = self._read = 0
        """Number of shards that are in memory, and number of shards that are read."""
        self.read = start
        """Time at which the disk finishes the block."""
        self._free = list(free)

    @property
    def free(self) -> list[float]:
        """Sorted times at which the threads finish."""
        return sorted(self._free)

    def add(self, state: State) -> None:
        """Add an expert to the block."""
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
        """Whether, for all l up to min(K, L), the l-th thread becomes free no earlier than the l-th shard of the next
        block can be read ("compute-bound" in the main text of ZipMoE)."""
        many = min(self._costs.threads, self._costs.shards)
        return all(
            free - self.read >= count * self._costs.shard_s for count, free in enumerate(self.free[:many], start=1)
        )

    def _arrive(self, first: int, last: int) -> None:
        """Decode the shards `first` to `last` of the block, each after it has been read."""
        costs, free = self._costs, self._free
        for number in range(first, last + 1):
            heapq.heapreplace(free, max(free[0], self._start + number * costs.shard_s) + costs.decode_s)
