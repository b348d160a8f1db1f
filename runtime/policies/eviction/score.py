"""Lowest historical router score (row A16)."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add

from expertcast.runtime.policies.eviction.victims import Rescored, Scores
from expertcast.runtime.policies.registry import CacheShape, PolicyConfig


class Score(Rescored):
    """Gives up the expert with the lowest running mean of the router's probability, as a share of the highest one in
    its layer.

    The mean is over all steps of the layer, whether the expert was chosen or held in them or not. A layer whose router
    is sure of itself has a few high means and many very low ones: compared as they are, its experts would all go
    before those of a layer that is not (trap 13 under row A27).
    """

    name = "score"
    reads_scores = True

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._sums = [[0.0] * shape.experts for _ in range(shape.layers)]
        """[L][E] probabilities, summed over steps: as shares of the layer's highest they are what the means are."""

    def see_scores(self, layer: int, probability_E: Sequence[float]) -> None:
        self._sums[layer] = list(map(add, self._sums[layer], probability_E))
        self._changed.add(layer)

    def _score(self, layer: int) -> Scores:
        sums_E = self._sums[layer]
        return Scores(sums_E, 1 / (max(sums_E) or 1.0))
