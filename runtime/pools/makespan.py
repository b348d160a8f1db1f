"""How long a layer waits, from how many of its experts are in which state (ZipMoE, Algorithm 3; row E18)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from expertcast.runtime.pools.costs import Costs
from expertcast.runtime.pools.hits import Floats


def estimate_makespan(found_4: npt.NDArray[np.generic], size: int, costs: Costs) -> Floats:
    """Seconds, the experts' own computing left out.

    The larger of what the disk reads and of what the threads decode, where reading a shard counts as their work too: as
    if a thread waited for the shards that it decodes.

    Args:
        found_4: experts found in F, C, S and E, numbers or means [..., 4]; the others are missing.
        size: experts of the step.
        costs: of the operations.
    """
    full, both, mantissas, exponents = np.moveaxis(found_4, -1, 0)
    planes = costs.tensors * (size - full - both - mantissas)
    shards = costs.tensors * costs.shards * (size - full - both - exponents)
    decoded = costs.tensors * costs.shards * (size - full)
    reading = planes * costs.read_s + shards * costs.shard_s
    decoding = (shards * costs.shard_s + decoded * costs.decode_s) / costs.threads
    result: Floats = np.maximum(reading, decoding)
    return result
