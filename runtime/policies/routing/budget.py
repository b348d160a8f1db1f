"""As many of a token's experts as the free slots allow (rows D9 and D10).

T tokens, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.routing_rule import renormalises
from expertcast.runtime.policies.registry import CacheShape, PolicyConfig
from expertcast.runtime.policies.routing.base import Routed, RoutingPolicy


@dataclass(frozen=True, kw_only=True)
class BudgetConfig(PolicyConfig):
    """How many experts a token executes."""

    k_max: int | None = None
    """Most experts that a token executes (none: the model's K)."""

    def __post_init__(self) -> None:
        if self.k_max is not None and self.k_max < 1:
            raise ExpertcastError(f"k_max={self.k_max}: give 1 or more experts, or none for the model's K")


class Budget(RoutingPolicy):
    """A token executes its first k experts by weight, k the largest whose misses fit the free slots, at least 1.

    k = max{k <= k_max: u(k) <= available}, u(k) the experts among the first k that have no slot (eq. 18 to 21). The
    tokens of a step share the free slots in their order; an expert that one of them brings in is no miss of the next.
    The first expert runs even where nothing is free: eq. 20 leaves a token without any there.

    Where the router makes a token's weights sum to a constant they do so over the experts that are left (eq. 4);
    elsewhere those keep their weights. Not lossless, whatever the free slots save.

    Raises:
        ExpertcastError: `k_max` above the model's K.
    """

    name = "budget"
    config_class = BudgetConfig

    def __init__(self, config: BudgetConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._k_max = shape.top_k if config.k_max is None else config.k_max
        if self._k_max > shape.top_k:
            raise ExpertcastError(f"k_max={self._k_max}: a token has {shape.top_k} experts, give 1 to {shape.top_k}")
        self._renormalises: dict[int, bool] = {}

    def route(self, routed: Routed) -> tuple[Tensor, Tensor] | None:
        order_TK = routed.weights_TK.argsort(dim=-1, descending=True, stable=True)
        ranked = routed.ids_TK.gather(-1, order_TK).tolist()
        cached = set(routed.cached_E.nonzero().flatten().tolist())
        counts = _counts(ranked, cached, routed.available, self._k_max)
        if all(count == len(row) for count, row in zip(counts, ranked, strict=True)):
            return None
        count_T1 = torch.tensor(counts, device=order_TK.device)[:, None]
        runs_TK = order_TK.argsort(dim=-1) < count_T1  # the inverse permutation: each place's rank
        weights_TK = routed.weights_TK.masked_fill(~runs_TK, 0.0)
        layer = routed.layer
        if layer.index not in self._renormalises:
            self._renormalises[layer.index] = renormalises(layer)
        if self._renormalises[layer.index]:
            sums_T1 = routed.weights_TK.float().sum(dim=-1, keepdim=True)
            left_T1 = weights_TK.float().sum(dim=-1, keepdim=True)
            weights_TK = (weights_TK.float() * (sums_T1 / left_T1)).to(weights_TK.dtype)
        whole_T1 = count_T1 == routed.ids_TK.shape[1]
        return routed.ids_TK, torch.where(whole_T1, routed.weights_TK, weights_TK)


def _counts(ranked: Sequence[Sequence[int]], cached: set[int], available: int, k_max: int) -> list[int]:
    """How many of its experts, the heaviest first, each token executes. `cached` grows by what they bring in."""
    counts = []
    for row in ranked:
        count = 0
        for expert in row[:k_max]:
            if expert not in cached:
                if count and not available:
                    break
                available = max(0, available - 1)
                cached.add(expert)
            count += 1
        counts.append(count)
    return counts
