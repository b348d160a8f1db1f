"""Routing made by hand, and what is recorded of a real model."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from expertcast.data.routing_file import Routing, read_routing

RECORDED = Path(__file__).resolve().parents[3] / "benchmarks" / "routing"


def recorded(name: str) -> Routing:
    return read_routing(RECORDED / f"{name}.parquet")


def routing(ids: list[list[list[int]]], *, experts: int, prompt: int = 0) -> Routing:
    """
    Args:
        ids: [T][L][K]
    """
    return Routing(source="made", ids_TLK=np.array(ids), prompt_T=np.arange(len(ids)) < prompt, experts=experts)


def skewed(choose: random.Random, *, tokens: int, layers: int, experts: int, top_k: int) -> Routing:
    """Low experts more often, and the last token's again and again."""
    ids: list[list[list[int]]] = []
    for _ in range(tokens):
        token = []
        for layer in range(layers):
            chosen = set(choose.sample(ids[-1][layer], choose.randint(0, top_k - 1))) if ids else set()
            while len(chosen) < top_k:
                chosen.add(min(int(choose.expovariate(4 / experts)), experts - 1))
            token.append(sorted(chosen))
        ids.append(token)
    return routing(ids, experts=experts)
