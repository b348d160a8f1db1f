"""torchmetrics metrics of routing forecasts, one value per target layer.

T tokens, K experts per token, E routed experts per layer, L target layers, R ranks or 1.
States are plain sums, so that two ranks (or two halves of the data) add up to exactly the whole. Sources:
rows B6 (recall, cosine), B7 (rank alignment), A20 (budgets) and C2 (hard and soft match) of the definitions.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from expertcast.predictors.view import ModelShape, overfetched
from expertcast.training.comparison import RoutingComparison
from expertcast.training.metrics.means import TokenMean

BUDGETS = {"recall_at_k": 1.0, "recall_at_1.5k": 1.5, "recall_at_2k": 2.0}


def budget(factor: float, shape: ModelShape) -> int:
    """Experts fetched at an overfetch factor: what the runtime would ask for (:func:`overfetched`)."""
    return overfetched(factor, shape.top_k, shape.experts)


class PerLayerMetric(TokenMean, ABC):
    """Mean over tokens of some score, kept per target layer; a subclass only says what the score is."""

    per_rank: ClassVar[bool] = False
    """Whether a token's score is one number per rank."""

    def update(self, layer: int, comparison: RoutingComparison) -> None:
        """Add the tokens of one batch at one target layer (0 = the first target layer)."""
        score_TR = self.score(comparison)
        if score_TR is not None:
            self.add(score_TR, layer)

    def compute(self) -> Tensor:
        """Mean score per layer: [L], or [L, R] for a score per rank; NaN where nothing was scored.

        torchmetrics turns a result of one element into a scalar: :meth:`per_layer` keeps the shape.
        """
        mean_LR = super().compute().float()
        return mean_LR if self.per_rank else mean_LR[:, 0]

    def per_layer(self) -> Tensor:
        """What :meth:`compute` gives, [L] or [L, R] also for one layer."""
        result: Tensor = self.compute()
        return result.reshape(self.total_LR.shape if self.per_rank else self.count_L.shape)

    @abstractmethod
    def score(self, comparison: RoutingComparison) -> Tensor | None:
        """Score of each token, [T] or [T, R]; None where the predictor has nothing to score."""


class RecallAtBudget(PerLayerMetric):
    """|candidates and true experts| / K, with the forecast's first `budget` experts as candidates (B6, A20)."""

    def __init__(self, layers: int, budget: int, **kwargs: Any) -> None:
        super().__init__(layers, **kwargs)
        self.budget = budget

    def score(self, comparison: RoutingComparison) -> Tensor:
        return (comparison.place_TK < self.budget).float().mean(dim=1)


class Match(PerLayerMetric):
    """Share of tokens whose K forecast experts match the true ones in a certain way (C2).

    `exact_set`: the same experts; `hard_match`: in the same order by weight; `soft_match`: in another order;
    `mismatch`: at least one wrong expert.
    """

    KINDS = ("exact_set", "hard_match", "soft_match", "mismatch")

    def __init__(self, layers: int, kind: str, **kwargs: Any) -> None:
        super().__init__(layers, **kwargs)
        self.kind = kind

    def score(self, comparison: RoutingComparison) -> Tensor:
        same_set_T = (comparison.place_TK < comparison.place_TK.shape[1]).all(dim=1)
        same_order_T = (comparison.forecast.ids_TK == comparison.truth.ids_TK).all(dim=1)
        matches_T = (same_set_T, same_order_T, same_set_T & ~same_order_T, ~same_set_T)
        return matches_T[self.KINDS.index(self.kind)].float()


class WeightCovered(PerLayerMetric):
    """Share of the true combine weight that falls on the K forecast experts."""

    def score(self, comparison: RoutingComparison) -> Tensor:
        weights_TK, top_k = comparison.truth.weights_TK, comparison.place_TK.shape[1]
        covered_T = (weights_TK * (comparison.place_TK < top_k)).sum(dim=1)
        return covered_T / weights_TK.sum(dim=1).clamp_min(1e-20)


class RankAlignment(PerLayerMetric):
    """Per rank r by weight: P[forecast expert at rank r is the true expert at rank r] (B7, Fig. 5)."""

    per_rank = True

    def __init__(self, layers: int, top_k: int, **kwargs: Any) -> None:
        super().__init__(layers, width=top_k, **kwargs)

    def score(self, comparison: RoutingComparison) -> Tensor:
        return (comparison.forecast.ids_TK == comparison.truth.ids_TK).float()


class InputCosine(PerLayerMetric):
    """Mean cosine between the predictor's input vector and the true router input s_{l+ahead} (B6)."""

    def score(self, comparison: RoutingComparison) -> Tensor | None:
        return comparison.cosine_T


def routing_metrics(shape: ModelShape, layers: int, **kwargs: Any) -> dict[str, PerLayerMetric]:
    """The metrics of an evaluation of so many target layers by name, fresh; `kwargs` are torchmetrics' own."""
    metrics: dict[str, PerLayerMetric] = {
        name: RecallAtBudget(layers, budget(factor, shape), **kwargs) for name, factor in BUDGETS.items()
    }
    metrics |= {kind: Match(layers, kind, **kwargs) for kind in Match.KINDS}
    metrics["weight_covered"] = WeightCovered(layers, **kwargs)
    metrics["rank_alignment"] = RankAlignment(layers, shape.top_k, **kwargs)
    metrics["cosine"] = InputCosine(layers, **kwargs)
    return metrics


def chance_levels(shape: ModelShape) -> dict[str, float]:
    """What forecasting K experts at random scores, by metric name."""
    exact = 1.0 / math.comb(shape.experts, shape.top_k)
    hard = exact / math.factorial(shape.top_k)
    levels = {name: budget(factor, shape) / shape.experts for name, factor in BUDGETS.items()}
    return levels | {
        "exact_set": exact,
        "hard_match": hard,
        "soft_match": exact - hard,
        "mismatch": 1.0 - exact,
        "weight_covered": shape.top_k / shape.experts,
        "rank_alignment": 1.0 / shape.experts,
    }
