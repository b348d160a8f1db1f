"""What the operations on an expert cost, in the symbols of ZipMoE (section 3.3, row E5). Measured elsewhere."""

from __future__ import annotations

import math
from dataclasses import dataclass

from expertcast.predictors.errors import ExpertcastError


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of one disk and of the threads that decode.

    Raises:
        ExpertcastError: a negative or endless time or ratio, or no shard, thread or tensor.
    """

    read_s: float
    """u: to read one tensor's sign-mantissa plane."""
    ratio: float
    """rho: bytes of the compressed exponents as a share of their plane's."""
    decode_s: float
    """c: to decode one shard of a tensor's exponents, and to put its share of the tensor back together."""
    shards: int = 1
    """K, of each tensor."""
    threads: int = 1
    """L, that decode."""
    tensors: int = 1
    """n, of each expert."""

    def __post_init__(self) -> None:
        for name in ("read_s", "ratio", "decode_s"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ExpertcastError(f"{name}={value}: give a finite number of 0 or more")
        for name in ("shards", "threads", "tensors"):
            if getattr(self, name) < 1:
                raise ExpertcastError(f"{name}={getattr(self, name)}: give 1 or more")

    @property
    def shard_s(self) -> float:
        """v = rho u / K: to read one shard."""
        return self.ratio * self.read_s / self.shards
