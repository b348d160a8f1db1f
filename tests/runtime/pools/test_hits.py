"""Hits of pools and the draws behind them, against every subset of experts."""

from __future__ import annotations

import tracemalloc
from itertools import combinations, product

import numpy as np
import pytest

from expertcast.predictors import ExpertcastError
from expertcast.runtime.pools.ranks import (
    RankModel,
    fit_selection,
    hit_patterns,
    inclusion,
    interval_hits,
    pattern_chances,
    poisson_binomials,
)

RANKS = 7


def draws(weights_R: np.ndarray, size: int) -> dict[tuple[int, ...], float]:
    """Probability of each set of `size` ranks: in proportion to the product of w = q / (1 - q)."""
    odds = weights_R / (1 - weights_R)
    chances = {chosen: float(np.prod(odds[list(chosen)])) for chosen in combinations(range(len(odds)), size)}
    total = sum(chances.values())
    return {chosen: chance / total for chosen, chance in chances.items()}


def test_poisson_binomial_against_enumeration() -> None:
    """Row E15."""
    chances_LR = np.random.default_rng(0).random((2, RANKS))
    found = poisson_binomials(chances_LR, RANKS)
    for layer, chances_R in enumerate(chances_LR):
        for first in range(RANKS + 1):
            exact = np.zeros(RANKS + 1)
            for hit in product((0, 1), repeat=first):
                exact[sum(hit)] += np.prod([q if yes else 1 - q for q, yes in zip(chances_R, hit, strict=False)])
            assert found[layer, first] == pytest.approx(exact, abs=1e-12)
    assert poisson_binomials(chances_LR, 3) == pytest.approx(found[..., :4]), "cut off, not folded"


def test_intervals() -> None:
    chances_R = np.random.default_rng(1).random(RANKS)
    found = interval_hits(chances_R, 4)
    for first, last in combinations(range(RANKS + 1), 2):
        assert found[first, last] == pytest.approx(poisson_binomials(chances_R[None, first:last], 4)[0, -1])
        assert not found[last, first].any()


@pytest.mark.parametrize("size", [0, 1, 3, 5])
def test_hit_patterns_against_enumeration(size: int) -> None:
    """Row E16, with an empty pool, a full one, and pools that leave nothing missing."""
    chances_R = np.random.default_rng(2).random(RANKS)
    patterns = hit_patterns(5)
    assert len(patterns) == 126
    intervals = interval_hits(chances_R, 5)
    for ends in ([1, 3, 4, 6], [0, 2, 2, 3], [2, 4, 6, 7], [7, 7, 7, 7], [0, 0, 0, 0]):
        exact = dict.fromkeys(map(tuple, patterns.tolist()), 0.0)
        edges = [0, *ends]
        for chosen, chance in draws(chances_R, size).items():
            exact[
                tuple(sum(low <= rank < high for rank in chosen) for low, high in zip(edges, ends, strict=False))
            ] += chance
        found = pattern_chances(intervals, np.array(ends), patterns, size)
        assert found == pytest.approx(list(exact.values()), abs=1e-12)


def test_inclusion_against_enumeration() -> None:
    """Equation 24, for one number of experts and for a mixture."""
    chances_LR = np.random.default_rng(3).random((2, RANKS))
    sizes_LM = np.array([[0, 0, 0, 1.0, 0], [0.1, 0.2, 0, 0.3, 0.4]])
    found = inclusion(chances_LR, sizes_LM)
    for layer in range(2):
        exact = np.zeros(RANKS)
        for size, share in enumerate(sizes_LM[layer]):
            for chosen, chance in draws(chances_LR[layer], size).items():
                exact[list(chosen)] += share * chance
        assert found[layer] == pytest.approx(exact, abs=1e-12)


def test_fitted_draws_include_each_rank_as_often_as_observed() -> None:
    """Row E17: from very unequal draws, for one number of experts and for a mixture."""
    random = np.random.default_rng(4)
    chances_LR = 1 / (1 + np.exp(-random.normal(0, 2.5, (3, 64))))
    sizes_LM = np.zeros((3, 13))
    sizes_LM[0, 8] = 1
    sizes_LM[1, 6:13] = 1 / 7
    sizes_LM[2, 1] = 1
    observed_LR = inclusion(chances_LR, sizes_LM)
    fitted_LR = fit_selection(observed_LR, sizes_LM)
    assert inclusion(fitted_LR, sizes_LM) == pytest.approx(observed_LR, abs=2e-6)
    odds_LR = np.log(fitted_LR / (1 - fitted_LR)) - np.log(chances_LR / (1 - chances_LR))
    likely_LR = observed_LR > 1e-3
    for odds_R, likely_R in zip(odds_LR, likely_LR, strict=True):
        assert np.ptp(odds_R[likely_R]) < 0.01, "the same draws again, up to a common factor"


def test_ranks_that_are_always_or_never_used() -> None:
    observed_LR = np.array([[1.0, 1.0, 0.6, 0.4, 0.0, 0.0]])
    sizes_LM = np.array([[0, 0, 0, 1.0]])
    model = RankModel(observed_LR, sizes_LM, np.zeros((1, 7, 6)))
    found = inclusion(model.selection(), sizes_LM)
    assert found == pytest.approx(observed_LR, abs=1e-4)


def test_hit_patterns_take_their_own_memory_only() -> None:
    """A grid of all numbers of hits would be 520 MB for 64 experts; 256 experts have 186 million patterns."""
    tracemalloc.start()
    patterns = hit_patterns(64)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(patterns) == 814_385
    assert peak < 4 * patterns.nbytes
    with pytest.raises(ExpertcastError, match="up to 256 experts of a layer, too many to plan pools for"):
        hit_patterns(256)
