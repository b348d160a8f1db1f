"""How often experts of each rank are used, and the distribution of a step's experts that follows.

L MoE layers, R ranks (as many as experts), M most experts that one step of a layer uses, G hit patterns, four pools in
the order F, C, S, E. A layer's experts are ranked by how often they were used before the step (ZipMoE, section 3.4).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from expertcast.data.routing_file import Routing
from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.pools.cache import Ranking

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
_MOST_PATTERNS = 2**20


def interval_hits(chances_R: Floats, most: int) -> Floats:
    """Probability of 0, 1, ... `most` hits among the ranks from a up to b, b left out, each rank hit by itself
    [a, b, hits]; zero where b < a (ZipMoE, Algorithm 2)."""
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
    """Probability of each hit pattern when a step uses `size` experts (ZipMoE, section 3.4 and Algorithm 4).

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


_LEAST = 1e-6
"""Inclusion probabilities are kept this far from 0 and from 1."""
_ITERATIONS, _CLOSE = 500, 1e-9


@dataclass(frozen=True, slots=True)
class RankModel:
    """What a planner knows of the routing: the mean over layers."""

    sizes_M: Floats
    """Probability that a step uses 0, 1, ... M experts: one number for single tokens, many for batches."""
    moved_RR: Floats
    """Probability that a step uses the expert at a rank, by the rank that it had behind its last use [R + 1, the last
    row for none] and the one that it has now."""

    @property
    def inclusion_R(self) -> Floats:
        """f: probability that a step uses the expert at a rank."""
        inclusion_R: Floats = self.moved_RR.sum(axis=0)
        return inclusion_R


def rank_model(routing: Routing) -> RankModel:
    """Count at which rank each decoded token's experts were before it, as a cache that runs along sees them.

    Args:
        routing: prompts are counted in the ranking and not in the model, as they use nearly everything.

    Raises:
        ExpertcastError: no decoded steps.
    """
    layers, experts = routing.layers, routing.experts
    rankings = [Ranking(experts) for _ in range(layers)]
    sizes_M, moved_RR = np.zeros(experts + 1), np.zeros((experts + 1, experts))
    last_LE = np.full((layers, experts), experts)
    decoded = 0
    for step in routing.steps():
        decoded += not step.fresh
        for layer, rows in enumerate(step.rows):
            keys = sorted({expert for row in rows for expert in row})
            ranking = rankings[layer]
            if not step.fresh:
                moved_RR[last_LE[layer, keys], [ranking.rank(expert) for expert in keys]] += 1
                sizes_M[len(keys)] += 1
            ranking.use(keys)
            last_LE[layer, keys] = [ranking.rank(expert) for expert in keys]
    if not decoded:
        raise ExpertcastError(f"{routing.source} has no decoded tokens: give routing with some")
    most = int(np.flatnonzero(sizes_M)[-1])
    return RankModel(sizes_M[: most + 1] / (decoded * layers), moved_RR / (decoded * layers))


def fit_selection(inclusion_R: Floats, sizes_M: Floats) -> Floats:
    """Selection probabilities q [R] of independent draws that, given how many are drawn, include each rank as often as
    observed: the distribution of largest entropy (ZipMoE, Theorem 3.2 and equations 23 and 24).

    w <- w f / f(w) by iterative proportional fitting, q = w / (1 + w). The paper prints w <- w f / R(k, N), which
    diverges. Where steps use different numbers of experts, f(w) is the mean over the observed numbers; one w serves
    them all, since a factor common to all of w changes nothing once the number is given. f is kept from 0 and 1, and
    scaled to the mean number of experts where that leaves it below 1.
    """
    target_R = np.clip(inclusion_R, _LEAST, 1 - _LEAST)
    scaled_R = target_R * (sizes_M @ np.arange(len(sizes_M))) / target_R.sum()
    if scaled_R.max() <= 1 - _LEAST:
        target_R = scaled_R
    selection_R = target_R.copy()
    for _ in range(_ITERATIONS):
        found_R = inclusion(selection_R, sizes_M)
        if np.abs(found_R - target_R).max() < _CLOSE:
            break
        weights_R = selection_R / (1 - selection_R) * target_R / found_R
        selection_R = weights_R / (1 + weights_R)
    return selection_R


def inclusion(selection_R: Floats, sizes_M: Floats) -> Floats:
    """f(w) [R]: how often each rank is drawn, given how many are (equation 24), mean over the sizes.

    Ranks before and behind each one are convolved: exact, and stable where dividing one factor out of the whole
    polynomial is not.
    """
    most = len(sizes_M) - 1
    intervals = interval_hits(selection_R, most)
    before_RM, behind_RM, total_M = intervals[0, :-1], intervals[1:, -1], intervals[0, -1]
    found_R = np.zeros_like(selection_R)
    for size in range(1, most + 1):
        if sizes_M[size] > 0:
            others_R = (before_RM[:, :size] * behind_RM[:, size - 1 :: -1]).sum(axis=1)
            found_R += sizes_M[size] / total_M[size] * selection_R * others_R
    return found_R
