"""Hits of moe-policylang's replay on routing files; writes their decoded tokens beside, for `expertcast simulate`.

    PYTHON benchmarks/policies_peer.py benchmarks/routing/*.parquet

PYTHON has `moe-policylang` alone. Its replay takes decoded tokens of one sequence, with a cache for each layer.

T tokens, L MoE layers, K experts per token.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet
from moe_policylang.benchmark.replay import LRUCache, replay_policies
from moe_policylang.integrations.trace_recorder import TraceEntry, TraceRecording

EXPERTS = 128
SLOTS = (13, 32, 64)
"""Slots per layer."""


def decoded(path: Path) -> np.ndarray:
    """Return the decoded tokens' experts [T, L, K] of a routing table."""
    table = pyarrow.parquet.read_table(path)
    step, layer, rank, expert = (table[name].to_numpy() for name in ("step", "layer", "rank", "expert"))
    kept = table["prefill"].to_numpy() == 0
    _, row = np.unique(step[kept], return_inverse=True)
    ids_TLK = np.zeros((row.max() + 1, layer.max() + 1, rank.max() + 1), dtype=np.int64)
    ids_TLK[row, layer[kept], rank[kept]] = expert[kept]
    return ids_TLK


def recording(ids_TLK: np.ndarray) -> TraceRecording:
    """Return the routing in the peer's form; the softmax has the order of the ranks."""
    tokens, layers, top_k = ids_TLK.shape
    entries = []
    for token, layer in np.ndindex(tokens, layers):
        softmax_E = np.zeros(EXPERTS)
        softmax_E[ids_TLK[token, layer]] = np.arange(top_k, 0, -1) / (top_k * (top_k + 1) / 2)
        entries.append(TraceEntry(0, token, layer, ids_TLK[token, layer].tolist(), router_softmax=softmax_E.tolist()))
    return TraceRecording("recorded", layers, EXPERTS, top_k, entries)


def lru_by_events(ids_TLK: np.ndarray, slots: int) -> int:
    """Return the hits of the peer's `LRUCache` where a token's experts at a layer are one event.

    Hits are counted before the event changes the cache, and the event does not evict what it needs.
    """
    hits = 0
    for ids_TK in ids_TLK.transpose(1, 0, 2).tolist():
        cache = LRUCache(slots)
        for row in ids_TK:
            inside = [expert for expert in row if expert in cache]
            hits += len(inside)
            for expert in [*inside, *(each for each in row if each not in inside), *row]:
                cache.touch(expert)
    return hits


def main() -> None:
    """Print the hits for each file, number of slots and policy."""
    for path in map(Path, sys.argv[1:]):
        ids_TLK = decoded(path)
        np.save(path.with_suffix(".npy").name, ids_TLK)
        trace = recording(ids_TLK)
        for slots in SLOTS:
            found = replay_policies(trace, ids_TLK.shape[2], ("topk_lru", "topk_lfu", "belady"), [slots / EXPERTS])
            hits = {each.label: each.hits for each in found} | {"lru by events": lru_by_events(ids_TLK, slots)}
            print(f"{path.stem}, {slots} slots per layer, {ids_TLK.size} requests: {hits}", flush=True)


if __name__ == "__main__":
    main()
