"""Lookups made by hand and drawn at random."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from expertcast.runtime.policies.base import CacheShape
from expertcast.runtime.policies.miss import MISS, Lookup, MissPolicy
from expertcast.runtime.storage.layout import FULL, PRECISIONS


def policy(text: str, *, experts: int = 8, top_k: int = 4) -> MissPolicy:
    return MISS.choose(text).make(CacheShape(layers=4, experts=experts, top_k=top_k, slots=12))


def lookup(
    ids: Sequence[Sequence[int]],
    weights: Sequence[Sequence[float]],
    held: Mapping[int, str],
    *,
    free: int = 0,
    probabilities: Sequence[Sequence[float]] = (),
) -> Lookup:
    return Lookup(layer=0, ids=ids, weights=weights, probabilities=lambda: probabilities, held=held, free=free)


def drawn(seed: int, *, experts: int = 12, top_k: int = 4) -> Lookup:
    """Some tokens' routing as a softmax over random logits gives it, and any content of the cache."""
    draw = random.Random(seed)
    rows = [[draw.expovariate(1.0) ** 3 for _ in range(experts)] for _ in range(draw.choice((1, 1, 2, 5)))]
    probabilities = [[value / sum(row) for value in row] for row in rows]
    ids = [sorted(range(experts), key=lambda expert: -row[expert])[:top_k] for row in probabilities]
    weights = [[row[expert] for expert in chosen] for row, chosen in zip(probabilities, ids, strict=True)]
    held = {
        expert: draw.choice((FULL, FULL, *PRECISIONS))
        for expert in draw.sample(range(experts), draw.randint(0, experts))
    }
    return lookup(ids, weights, held, free=draw.choice((0, 0, 2, 50)), probabilities=probabilities)
