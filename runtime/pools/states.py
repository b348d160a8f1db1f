"""States of an expert in memory, with its bytes, and the costs of reading and decoding.

A bf16 tensor is stored on disk as two planes of one byte per element: signs and mantissas, uncompressed, and exponents,
compressed in K shards.

Source: ZipMoE, section 3.2 and Figure 6.
"""

from __future__ import annotations

from collections.abc import Mapping
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
