"""Planner of pools: the split of memory over pools with the least expected time (ZipMoE, Algorithm 4).

R ranks, M maximum number of experts in a step, G hit patterns, N allocations; four pools in the order F, C, S, E.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from expertcast.data.routing_file import Routing
from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.pools.cache import Ranking
from expertcast.runtime.pools.states import POOLS, Costs, ExpertBytes, State

# Statistics of the use of experts by rank, and the distribution of a step's experts over pools.
#
# L MoE layers, R ranks (as many as experts), M maximum number of experts in a step of a layer, G hit patterns, four
# pools in the order F, C, S, E. Experts of a layer are ranked by their use before the step (ZipMoE, section 3.4).

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
_MOST_PATTERNS = 2**20


def interval_hits(chances_R: Floats, most: int) -> Floats:
    """Return the distribution of the number of hits in every range of ranks (ZipMoE, Algorithm 2).

    Args:
        chances_R: probability that each rank is hit, independently of the others.
        most: maximum number of hits.

    Returns:
        Probability [a, b, hits] for ranks a to b - 1; zero where b < a.
    """
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
    """Return all combinations of hits in F, C, S and E with a sum of at most `most` [G, 4].

    Raises:
        ExpertcastError: there are more than 2^20 combinations.
    """
    if math.comb(most + 4, 4) > _MOST_PATTERNS:
        raise ExpertcastError(
            f"steps use up to {most} experts of a layer, too many to plan pools for: give routing of single sequences"
        )
    patterns = np.zeros((1, 0), dtype=np.int64)
    for _ in range(4):
        choices = most - patterns.sum(axis=1) + 1
        first = np.repeat(choices.cumsum() - choices, choices)
        patterns = np.column_stack([np.repeat(patterns, choices, axis=0), np.arange(choices.sum()) - first])
    return patterns


def pattern_chances(intervals: Floats, ends: Counts, patterns_G4: Counts, size: int) -> Floats:
    """Return the probability of each hit pattern if a step uses `size` experts (ZipMoE, section 3.4 and Algorithm 4).

    This is Phi_M(size - hits) / Phi_N(size) times the product of Phi(h) over pools. Pools cover consecutive ranks.

    Args:
        intervals: result of :func:`interval_hits`.
        ends: first rank after each pool [..., 4].
        patterns_G4: result of :func:`hit_patterns`.
        size: number of experts of the step, at most the `most` of `intervals`.

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
"""Minimum distance of inclusion probabilities from 0 and 1."""
_ITERATIONS, _CLOSE = 500, 1e-9


@dataclass(frozen=True)
class RankModel:
    """Statistics of the routing, averaged over layers."""

    sizes_M: Floats
    """Probability that a step uses 0, 1, ... M experts."""
    moved_RR: Floats
    """Probability that a step uses an expert, by its rank after its last use (R + 1 rows, the last for no use) and its
    current rank (R columns)."""

    @cached_property
    def selection_R(self) -> Floats:
        """Selection probabilities q of independent draws (:func:`fit_selection`)."""
        return fit_selection(self.moved_RR.sum(axis=0), self.sizes_M)

    def hit_rate(self, count: int) -> float:
        """Return the share of uses that find their expert among the first `count` ranks, and found it there before."""
        return float(self.moved_RR[:count, :count].sum() / self.moved_RR.sum())


def rank_model(routing: Routing) -> RankModel:
    """Count the ranks of the experts of each decoded token, as a cache would see them.

    Args:
        routing: recorded routing. Prompts update the ranking but are not counted, since they use nearly all experts.

    Raises:
        ExpertcastError: the routing has no decoded tokens.
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
    """Fit the selection probabilities q [R] of independent draws to observed inclusion probabilities.

    Conditional on the number of draws, the draws include each rank as often as observed; this is the distribution of
    maximum entropy. Iterative proportional fitting repeats w <- w f / f(w), with q = w / (1 + w). If the number of
    experts differs between steps, f(w) is the mean over the observed numbers.

    Source: ZipMoE, Theorem 3.2 and eq. 23 and 24. The paper prints w <- w f / R(k, N), which diverges.

    Args:
        inclusion_R: observed probability f of each rank. It is clipped away from 0 and 1, and scaled to the mean number
            of experts where this leaves it below 1.
        sizes_M: probability of 0, 1, ... M experts in a step.
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
    """Return the probability f(w) that each rank is drawn [R], given the number of draws (ZipMoE, eq. 24).

    The distributions of the ranks before and after each rank are convolved. This is exact and, unlike the division of
    the whole polynomial by one factor, numerically stable.

    Args:
        selection_R: selection probabilities q.
        sizes_M: probability of 0, 1, ... M draws; the result is the mean over them.
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


def estimate_makespan(found_4: npt.NDArray[np.generic], size: int, costs: Costs) -> Floats:
    """Estimate the seconds until the experts of a layer are ready, without computing them (ZipMoE, Algorithm 3).

    This is the larger of the reading time of the disk and the decoding time of the threads. Decoding includes the
    reading of shards, as if a thread waited for the shards that it decodes.

    Args:
        found_4: number of experts found in F, C, S and E, or mean numbers [..., 4]; the others are missing.
        size: number of experts of the step.
        costs: seconds per operation.

    Returns:
        Seconds [...].
    """
    full, both, mantissas, exponents = np.moveaxis(found_4, -1, 0)
    planes = size - full - both - mantissas
    shards = costs.shards * (size - full - both - exponents)
    decoded = costs.shards * (size - full)
    reading = planes * costs.read_s + shards * costs.shard_s
    decoding = (shards * costs.shard_s + decoded * costs.decode_s) / costs.threads
    result: Floats = np.maximum(reading, decoding)
    return result


_CELLS = 2**21
"""Maximum number of elements of a temporary array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Allocation of memory to pools, the same for every layer."""

    memory: dict[State, int]
    """Bytes of each pool, per layer."""
    experts: dict[State, int]
    """Number of experts that fit each pool, per layer."""
    expected_s: float
    """Mean seconds until the experts of a layer are ready."""


def plans(
    model: RankModel,
    costs: Costs,
    *,
    size: ExpertBytes,
    memory: int,
    step: float = 0.05,
) -> list[Plan]:
    """Evaluate all allocations of a grid.

    Args:
        model: statistics of the routing.
        costs: seconds per operation.
        size: bytes of an expert's parts.
        memory: bytes for the pools of one layer.
        step: step of the grid as a share of the memory, 1 / n (the paper's delta, which is also its dispatch margin).

    Returns:
        Allocations by ascending expected time.
    """
    parts = round(1 / step)
    bytes_4 = np.array([size.held(state) for state in POOLS])
    shares_N4 = np.array(list(_compositions(parts, 4)))
    counts_N4 = np.unique(_counts(shares_N4, parts, memory, bytes_4), axis=0)
    seconds_N = expected_makespans(model, costs, counts_N4)
    found = []
    for index in np.argsort(seconds_N, kind="stable").tolist():
        counts = counts_N4[index].tolist()
        experts = dict(zip(POOLS, counts, strict=True))
        held = {state: count * size.held(state) for state, count in experts.items()}
        found.append(Plan(memory=held, experts=experts, expected_s=float(seconds_N[index])))
    return found


def expected_makespans(model: RankModel, costs: Costs, counts_N4: Counts) -> Floats:
    """Return the mean seconds per layer [N] for pools of these sizes.

    Pools cover consecutive ranks. The paper assumes that every expert is found in the state of its rank's pool; here
    the state is averaged over the ranks that experts had at their last use (:func:`found_states`).

    Args:
        model: statistics of the routing.
        costs: seconds per operation.
        counts_N4: number of experts that fit each pool.
    """
    sizes_M = model.sizes_M
    selection_R = model.selection_R
    most = len(sizes_M) - 1
    ends_N4 = np.minimum(np.cumsum(counts_N4, axis=1), len(selection_R))
    patterns_G4 = hit_patterns(most)
    intervals = interval_hits(selection_R, most)
    seconds_N = np.zeros(len(counts_N4))
    rows = max(1, _CELLS // patterns_G4.size)
    for first in range(0, len(counts_N4), rows):
        ends_n4 = ends_N4[first : first + rows]
        found_nG4 = patterns_G4 @ found_states(model.moved_RR, ends_n4)
        for size in np.flatnonzero(sizes_M).tolist():
            chances_nG = pattern_chances(intervals, ends_n4, patterns_G4, size)
            mean_n = (chances_nG * estimate_makespan(found_nG4, size, costs)).sum(axis=1)
            seconds_N[first : first + rows] += sizes_M[size] * mean_n
    return seconds_N


def found_states(moved_RR: Floats, ends_N4: Counts) -> Floats:
    """Return the distribution of the states in which used experts are found, by the pool of their current rank.

    A used expert enters the pool of its rank and then moves down only. A full one becomes S in pools C and S. One of
    pool C becomes S or, without a pool S, E.

    Args:
        moved_RR: probability of a use by the rank after the last use and the current rank (:class:`RankModel`).
        ends_N4: first rank after each pool.

    Returns:
        Shares [N, pool, state F C S E]; the remainder to 1 is missing.
    """
    sums = np.zeros((moved_RR.shape[0] + 1, moved_RR.shape[1] + 1))
    sums[1:, 1:] = moved_RR.cumsum(axis=0).cumsum(axis=1)
    edges_N5 = np.pad(ends_N4, ((0, 0), (1, 0)))
    used_N4 = np.diff(sums[-1][edges_N5], axis=1)
    moved_N44 = np.diff(np.diff(sums[edges_N5[:, :, None], edges_N5[:, None, :]], axis=1), axis=2)
    no_mantissas_N = ends_N4[:, 2] == ends_N4[:, 1]
    found_N44 = np.zeros_like(moved_N44)
    for now in range(4):
        found_N44[:, now, now] = moved_N44[:, now:, now].sum(axis=1)
    found_N44[:, 1, 2] += moved_N44[:, 0, 1]
    found_N44[:, 2, 2] += moved_N44[:, 0, 2] + moved_N44[:, 1, 2]
    found_N44[:, 3, 3] += moved_N44[:, 1, 3] * no_mantissas_N
    used_N41 = used_N4[:, :, None]
    shares_N44: Floats = np.divide(found_N44, used_N41, out=np.zeros_like(found_N44), where=used_N41 > 0)
    return shares_N44


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield all ordered ways to write `total` as a sum of `parts` numbers."""
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for others in _compositions(total - first, parts - 1):
            yield (first, *others)


def _counts(shares_N4: Counts, parts: int, memory: int, bytes_4: Counts) -> Counts:
    """Return whole experts per pool [N, 4]; the remainder of a share goes to the next pool with a share."""
    counts_N4 = np.zeros_like(shares_N4)
    over_N = np.zeros(len(shares_N4), dtype=np.int64)
    for pool in range(4):
        over_N = over_N + shares_N4[:, pool] * memory // parts
        counts_N4[:, pool] = np.where(shares_N4[:, pool] > 0, over_N // bytes_4[pool], 0)
        over_N -= counts_N4[:, pool] * bytes_4[pool]
    return counts_N4
