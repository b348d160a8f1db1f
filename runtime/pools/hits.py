"""How many of a step's experts are found in each pool.

R ranks, M most experts of a step, G hit patterns, four pools in the order F, C, S, E.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from expertcast.predictors.errors import ExpertcastError

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
_MOST_PATTERNS = 2**20


def poisson_binomials(chances_LR: Floats, most: int) -> Floats:
    """Probability of 0, 1, ... `most` hits among the first 0, 1, ... R ranks [L, R + 1, most + 1], each rank hit by
    itself (ZipMoE, Algorithm 2; row E15)."""
    layers, ranks = chances_LR.shape
    found = np.zeros((layers, ranks + 1, most + 1))
    found[:, 0, 0] = 1.0
    for rank in range(ranks):
        chance = chances_LR[:, rank, None]
        found[:, rank + 1] = found[:, rank] * (1 - chance)
        found[:, rank + 1, 1:] += found[:, rank, :-1] * chance
    return found


def interval_hits(chances_R: Floats, most: int) -> Floats:
    """The same for ranks from a up to b, b left out: [a, b, hits], zero where b < a."""
    ranks = len(chances_R)
    found = np.zeros((ranks + 1, ranks + 1, most + 1))
    for end in range(ranks + 1):
        found[end, end, 0] = 1.0
        if end:
            chance, before = chances_R[end - 1], found[:end, end - 1]
            found[:end, end] = before * (1 - chance)
            found[:end, end, 1:] += before[:, :-1] * chance
    return found


def hit_patterns(most: int) -> Counts:
    """Every (hits in F, C, S, E) of together `most` or fewer [G, 4].

    Raises:
        ExpertcastError: there are too many for a planner.
    """
    if math.comb(most + 4, 4) > _MOST_PATTERNS:
        raise ExpertcastError(
            f"steps use up to {most} experts of a layer, too many to plan pools for: give routing of single texts"
        )
    patterns = np.zeros((1, 0), dtype=np.int64)
    for _ in range(4):
        choices = most - patterns.sum(axis=1) + 1
        first = np.repeat(choices.cumsum() - choices, choices)
        patterns = np.column_stack([np.repeat(patterns, choices, axis=0), np.arange(choices.sum()) - first])
    return patterns


def pattern_chances(intervals: Floats, ends: Counts, patterns_G4: Counts, size: int) -> Floats:
    """Probability of each hit pattern when a step uses `size` experts (ZipMoE, section 3.4 and Algorithm 4; row E16).

    Phi_M(size - hits) / Phi_N(size) times the pools' Phi(h); pools take ranks one after another.

    Args:
        intervals: of :func:`interval_hits`.
        ends: rank behind the last of each pool, in order [..., 4].
        patterns_G4: as :func:`hit_patterns` makes them.
        size: experts of the step, at most what `intervals` was made for.

    Returns:
        [..., G]; 0 for patterns of more than `size` hits.
    """
    ranks = intervals.shape[0] - 1
    rest_G = size - patterns_G4.sum(axis=1)
    chances: Floats = np.where(rest_G >= 0, intervals[ends[..., -1, None], ranks, np.maximum(rest_G, 0)], 0.0)
    start = np.zeros_like(ends[..., 0])
    for pool in range(4):
        chances = chances * intervals[start[..., None], ends[..., pool, None], patterns_G4[:, pool]]
        start = ends[..., pool]
    chances /= intervals[0, ranks, size]
    return chances
