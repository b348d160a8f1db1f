"""Which share of a side's memory keeps experts compressed: ZipMoE's planner, as `expertcast advise` uses it.

It is told the routing that will be run. What it chooses is two or three numbers per memory and disk.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from expertcast.data.routing_file import Routing
from expertcast.runtime.pools.planner import plans
from expertcast.runtime.pools.ranks import rank_model
from expertcast.runtime.pools.states import Costs, ExpertBytes, State, pools_text

DECODED = 1.0e9
"""Bytes of bf16 that a thread decodes in a second while the other one does, too."""
_SHARDS = 6
_LEAST_FULL = 1
"""Experts per layer for which there is a slot: plans without any would leave every hit to be decoded."""


def planned(
    ids_TLK: Sequence[Sequence[Sequence[int]]], *, prompt: int, experts: int, memory: int, passing: int,
    block: int, ratio: float, rate: float, threads: int,
) -> str:  # fmt: skip
    """What `OffloadConfig.pools` takes; empty where slots alone are best.

    Args:
        ids_TLK: routing of the text, of which the first `prompt` tokens are read at once.
        experts: E.
        memory: bytes of slots and pools.
        passing: slots that are no pool.
        block: bytes of an expert.
        ratio: of its coded bytes to these.
        rate: bytes per second of the disk.
        threads: that decode.
    """
    layers, plain = len(ids_TLK[0]), block // 2
    routing = Routing(
        source="bench", ids_TLK=np.array(ids_TLK), prompt_T=np.arange(len(ids_TLK)) < prompt, experts=experts
    )
    size = ExpertBytes(plane=plain, exponents=int(block * ratio) - plain)
    costs = Costs(
        read_s=plain / rate, ratio=size.exponents / plain, decode_s=block / _SHARDS / DECODED, shards=_SHARDS,
        threads=threads,
    )  # fmt: skip
    share = (memory - passing * block) // layers
    best = next(
        plan for plan in plans(rank_model(routing), costs, size=size, memory=share, step=0.1)
        if plan.experts[State.F] >= _LEAST_FULL
    )  # fmt: skip
    return pools_text({state: layers * nbytes for state, nbytes in best.memory.items()})
