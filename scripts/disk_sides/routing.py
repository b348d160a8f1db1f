"""What routing is like: how much of it comes again, and what a cache makes of it. N tokens, L layers, K experts."""

from __future__ import annotations

import statistics
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from expertcast.predictors.messages import Json

Ids = Sequence[Sequence[Sequence[int]]]


def described(ids_NLK: Ids, experts: int, shares: Sequence[float]) -> Json:
    """`overlap` of a token's experts with the token's before it, `distinct` experts of a layer, and `lru`: the share of
    hits of one least-recently-used cache over all layers, by its share of the experts."""
    layers, top_k = len(ids_NLK[0]), len(ids_NLK[0][0])
    pairs = pairwise(ids_NLK)
    shared = [len(set(a) & set(b)) for before, now in pairs for a, b in zip(before, now, strict=True)]
    distinct = [len({expert for ids_LK in ids_NLK for expert in ids_LK[layer]}) for layer in range(layers)]
    return {
        "tokens": len(ids_NLK),
        "overlap": statistics.fmean(shared) / top_k if shared else None,
        "distinct": statistics.fmean(distinct) / experts,
        "lru": {f"{share:g}": _lru(ids_NLK, int(share * layers * experts)) for share in shares},
    }


def _lru(ids_NLK: Ids, slots: int) -> float:
    held: OrderedDict[tuple[int, int], None] = OrderedDict()
    hits = asked = 0
    for ids_LK in ids_NLK:
        for layer, ids_K in enumerate(ids_LK):
            asked += len(ids_K)
            hits += sum((layer, expert) in held for expert in ids_K)
            for expert in ids_K:
                held[layer, expert] = None
                held.move_to_end((layer, expert))
            while len(held) > slots:
                held.popitem(last=False)
    return hits / asked
