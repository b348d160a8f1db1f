"""How many experts are found in each pool: the paper's formulas against every subset (rows E15 to E17)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from tests.runtime.pools.test_hits import draws

from expertcast.runtime.pools.ranks import (
    fit_selection,
    hit_patterns,
    inclusion,
    interval_hits,
    pattern_chances,
    poisson_binomials,
)

RANKS, MOST = 9, 4


def chances(trials: int = 20) -> dict[str, Any]:
    """The largest error of each formula, and what fitting by the two updates leaves after so many steps."""
    random_ = np.random.default_rng(6)
    binomial = pattern = 0.0
    for _ in range(trials):
        chances_R = random_.random(RANKS)
        hits = np.array([sum(hit) for hit in np.ndindex((2,) * RANKS)])
        each = np.array([np.prod(np.where(hit, chances_R, 1 - chances_R)) for hit in np.ndindex((2,) * RANKS)])
        exact = np.bincount(hits, each, RANKS + 1)
        binomial = max(binomial, float(np.abs(poisson_binomials(chances_R[None], RANKS)[0, -1] - exact).max()))
        ends = np.sort(random_.integers(0, RANKS + 1, 4))
        pattern = max(pattern, _pattern_error(chances_R, ends))
    fitted = _fitted(random_, trials)
    return {"trials": trials, "ranks": RANKS, "binomial_error": binomial, "pattern_error": pattern, **fitted}


def _pattern_error(chances_R: np.ndarray, ends: np.ndarray) -> float:
    patterns = hit_patterns(MOST)
    exact = dict.fromkeys(map(tuple, patterns.tolist()), 0.0)
    edges = [0, *ends.tolist()]
    for chosen, chance in draws(chances_R, MOST).items():
        hits = [sum(low <= rank < high for rank in chosen) for low, high in pairwise(edges)]
        exact[tuple(hits)] += chance
    found = pattern_chances(interval_hits(chances_R, MOST), ends, patterns, MOST)
    return float(np.abs(found - np.array(list(exact.values()))).max())


def _fitted(random_: np.random.Generator, trials: int) -> dict[str, Any]:
    """Inclusion probabilities that are met by the mended update, and how often the printed one gets them at all."""
    sizes_LM = np.zeros((1, MOST + 1))
    sizes_LM[0, MOST] = 1.0
    mended, printed = 0.0, 0
    for _ in range(trials):
        target_LR = inclusion(random_.random((1, 64)) ** 3 * 0.98 + 0.01, sizes_LM)
        mended = max(mended, float(np.abs(inclusion(fit_selection(target_LR, sizes_LM), sizes_LM) - target_LR).max()))
        printed += _as_printed(target_LR, sizes_LM)
    return {"fit_error": mended, "printed_converged": printed}


def _as_printed(target_LR: np.ndarray, sizes_LM: np.ndarray, steps: int = 60) -> bool:
    """w <- w f / R(k, N) from w = f on, with R of equation 23: whether that comes to the wanted probabilities."""
    weights_LR = target_LR.copy()
    with np.errstate(all="ignore"):
        for _ in range(steps):
            weights_LR = weights_LR * target_LR / _sum_of_products(weights_LR[0], MOST)
        error = np.abs(inclusion(weights_LR / (1 + weights_LR), sizes_LM) - target_LR).max()
    return bool(np.isfinite(error) and error < 1e-3)


def _sum_of_products(weights_R: np.ndarray, size: int) -> float:
    """R: over all sets of so many, of the products of their weights."""
    sums = np.zeros(size + 1)
    sums[0] = 1.0
    for weight in weights_R:
        sums[1:] = sums[1:] + weight * sums[:-1]
    return float(sums[size])
