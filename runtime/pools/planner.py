"""Planner of pools: the split of memory over pools with the least expected time (ZipMoE, Algorithm 4).

R ranks, M maximum number of experts in a step, G hit patterns, N allocations; four pools in the order F, C, S, E.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.pools.ranks import (
    Counts,
    Floats,
    RankModel,
    fit_selection,
    hit_patterns,
    interval_hits,
    pattern_chances,
)
from expertcast.runtime.pools.states import POOLS, Costs, ExpertBytes, State


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
        step: step of the grid as a share of the memory (the paper's delta, which is also its dispatch margin).

    Returns:
        Allocations by ascending expected time.

    Raises:
        ExpertcastError: 1 is not a multiple of `step`.
    """
    parts = round(1 / step) if step > 0 else 0
    if parts < 1 or abs(parts * step - 1) > 1e-9:
        raise ExpertcastError(f"step={step}: give a step of 1, 1/2, 1/3, ...")
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
    selection_R = fit_selection(model.inclusion_R, sizes_M)
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
