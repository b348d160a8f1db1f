"""In which state an expert is held, what it still needs before it can run, and how many bytes it takes.

A bf16 tensor lies on disk as two planes: signs and mantissas, a byte each, stored as they are, and exponents, a byte
each, compressed in K shards (ZipMoE, section 3.2 and Figure 6; rows E4, E6 and E12).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of one disk and of the threads that decode, in the symbols of ZipMoE (section 3.3)."""

    read_s: float
    """u: to read one expert's sign-mantissa plane."""
    ratio: float
    """rho: bytes of the compressed exponents as a share of their plane's."""
    decode_s: float
    """c: to decode one shard of an expert's exponents, and to put its share of the expert back together."""
    shards: int = 1
    """K, of each expert."""
    threads: int = 1
    """L, that decode."""

    @property
    def shard_s(self) -> float:
        """v = rho u / K: to read one shard."""
        return self.ratio * self.read_s / self.shards


class State(Enum):
    """What memory holds of an expert. The order is that of the pools, and of what is left to do."""

    F = "full"
    C = "compressed"
    S = "mantissas"
    E = "exponents"
    M = "missing"

    __hash__ = object.__hash__  # members are unique; Enum's own hash is a Python call, made at every lookup

    @property
    def reads_mantissas(self) -> bool:
        """Whether the sign-mantissa planes must be read: the experts of Type I; C and S are Type II."""
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
    """Bytes of one expert's parts; all experts of a model have about the same."""

    plane: int
    """Signs and mantissas: half of the expert."""
    exponents: int
    """Compressed exponents, all shards."""

    def held(self, state: State) -> int:
        """Bytes that an expert takes in a state (row E12)."""
        planes = {State.F: 2, State.C: 1, State.S: 1}.get(state, 0)
        return planes * self.plane + self.exponents * (state in (State.C, State.E))


POOLS = (State.F, State.C, State.S, State.E)
"""States that have a pool, hottest first."""


def pools_text(memory: Mapping[State, int]) -> str:
    """Bytes of the pools beside the slots, as `C=2000000,E=300000`; those of full experts are the slots."""
    return ",".join(f"{state.name}={memory[state]}" for state in POOLS if state is not State.F and memory.get(state))
