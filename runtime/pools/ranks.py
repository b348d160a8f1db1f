"""How often experts of each rank are used, and the distribution of a step's experts that follows.

L MoE layers, R ranks (as many as experts), M most experts that one step of a layer uses,
G hit patterns, four pools in the order F, C, S, E. A layer's experts are ranked
by how often they were used before the step (ZipMoE, section 3.4).
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


def poisson_binomials(chances_LR: Floats, most: int) -> Floats:
    """Probability of 0, 1, ... `most` hits among the first 0, 1, ... R ranks [L, R + 1, most + 1], each rank hit by
    itself (ZipMoE, Algorithm 2)."""
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
    """What a planner knows of the routing."""

    inclusion_LR: Floats
    """f: probability that a step uses the expert at a rank."""
    sizes_LM: Floats
    """Probability that a step uses 0, 1, ... M experts: one number for single tokens, many for batches."""
    moved_LRR: Floats
    """The same as `inclusion_LR` by the rank that the expert had behind its last use [R + 1, the last row for none] and
    the one that it has now."""

    def pooled(self) -> RankModel:
        """The mean layer, as the only one."""
        return RankModel(
            *(part.mean(axis=0, keepdims=True) for part in (self.inclusion_LR, self.sizes_LM, self.moved_LRR))
        )

    def selection(self) -> Floats:
        """q [L, R] of :func:`fit_selection`."""
        return fit_selection(self.inclusion_LR, self.sizes_LM)


def rank_model(routing: Routing) -> RankModel:
    """Count at which rank each decoded token's experts were before it, as a cache that runs along sees them.

    Args:
        routing: prompts are counted in the ranking and not in the model, as they use nearly everything.

    Raises:
        ExpertcastError: no decoded steps.
    """
    layers, experts = routing.layers, routing.experts
    rankings = [Ranking(experts) for _ in range(layers)]
    sizes_LM = np.zeros((layers, experts + 1))
    moved_LRR = np.zeros((layers, experts + 1, experts))
    last_LE = np.full((layers, experts), experts)
    decoded = 0
    for step in routing.steps():
        decoded += not step.fresh
        for layer, rows in enumerate(step.rows):
            keys = sorted({expert for row in rows for expert in row})
            ranking = rankings[layer]
            if not step.fresh:
                moved_LRR[layer, last_LE[layer, keys], [ranking.rank(expert) for expert in keys]] += 1
                sizes_LM[layer, len(keys)] += 1
            ranking.use(keys)
            last_LE[layer, keys] = [ranking.rank(expert) for expert in keys]
    if not decoded:
        raise ExpertcastError(f"{routing.source} has no decoded tokens: give routing with some")
    most = int(np.flatnonzero(sizes_LM.any(axis=0))[-1])
    moved_LRR /= decoded
    return RankModel(moved_LRR.sum(axis=1), sizes_LM[:, : most + 1] / decoded, moved_LRR)


def fit_selection(inclusion_LR: Floats, sizes_LM: Floats) -> Floats:
    """Selection probabilities q [L, R] of independent draws that, given how many are drawn, include each rank as often
    as observed: the distribution of largest entropy (ZipMoE, Theorem 3.2 and equations 23 and 24).

    w <- w f / f(w) by iterative proportional fitting, q = w / (1 + w). The paper prints w <- w f / R(k, N), which
    diverges. Where steps use different numbers of experts, f(w) is the mean over the observed numbers; one w serves
    them all, since a factor common to all of w changes nothing once the number is given. f is kept from 0 and 1, and
    scaled to the mean number of experts where that leaves it below 1.
    """
    numbers = np.arange(sizes_LM.shape[1])
    mean_L = sizes_LM @ numbers
    target_LR = _targets(inclusion_LR, mean_L)
    selection_LR = target_LR.copy()
    for _ in range(_ITERATIONS):
        found_LR = inclusion(selection_LR, sizes_LM)
        if np.abs(found_LR - target_LR).max() < _CLOSE:
            break
        weights_LR = selection_LR / (1 - selection_LR) * target_LR / found_LR
        selection_LR = weights_LR / (1 + weights_LR)
    return selection_LR


def inclusion(selection_LR: Floats, sizes_LM: Floats) -> Floats:
    """f(w) [L, R]: how often each rank is drawn, given how many are (equation 24), mean over the sizes.

    Ranks before and behind each one are convolved: exact, and stable where dividing one factor out of the whole
    polynomial is not.
    """
    most = sizes_LM.shape[1] - 1
    before_LRM = poisson_binomials(selection_LR, most)
    behind_LRM = poisson_binomials(selection_LR[:, ::-1], most)[:, ::-1]
    total_LM = before_LRM[:, -1]
    share_LM = np.divide(sizes_LM, total_LM, out=np.zeros_like(sizes_LM), where=sizes_LM > 0)
    found_LR = np.zeros_like(selection_LR)
    for size in range(1, most + 1):
        others_LR = (before_LRM[:, :-1, :size] * behind_LRM[:, 1:, size - 1 :: -1]).sum(axis=2)
        found_LR += share_LM[:, size, None] * selection_LR * others_LR
    return found_LR


def _targets(inclusion_LR: Floats, mean_L: Floats) -> Floats:
    clipped_LR = np.clip(inclusion_LR, _LEAST, 1 - _LEAST)
    scaled_LR = clipped_LR * (mean_L / clipped_LR.sum(axis=1))[:, None]
    feasible_L = scaled_LR.max(axis=1) <= 1 - _LEAST
    return np.where(feasible_L[:, None], scaled_LR, clipped_LR)
