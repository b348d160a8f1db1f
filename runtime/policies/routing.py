"""Routing policies: which experts a layer executes, given what the cache holds.

T tokens, E routed experts per layer, K experts per token, J guarded experts per token.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import MoELayer, renormalises, weights_over
from expertcast.runtime.policies.base import CacheShape, Policy, PolicyConfig, PolicyRegistry, number


@dataclass(slots=True, kw_only=True)
class Routed:
    """What a router said, and what the cache holds."""

    layer: MoELayer
    logits_TE: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    cached_E: Tensor
    """bool: the layer's experts that have a slot; on the device of the logits."""
    available: int
    """Free slots that the layer's misses may take without evicting (C_avail, eq. 18 of ActiveEvict)."""


class RoutingPolicy(Policy):
    """May choose other experts than the router; ids stay T x K, an expert that is not to run gets weight 0."""

    lossy: ClassVar[bool] = True
    """Whether the output may differ from the resident model's."""

    @abstractmethod
    def route(self, routed: Routed) -> tuple[Tensor, Tensor] | None:
        """(ids [T, K], weights [T, K]) to execute; None: the router's own. A place with weight 0 is not executed: it
        may name any expert."""


class Standard(RoutingPolicy):
    """Leaves the routing as it is."""

    name = "standard"
    lossy = False

    def route(self, routed: Routed) -> None:
        del routed


@dataclass(frozen=True, kw_only=True)
class CacheAwareConfig(PolicyConfig):
    """How strongly experts on the device are preferred."""

    strength: float = number(0.2, "[0, inf)")
    """Lambda: the bonus of an expert on the device, as a share of the logits' usual range; 0 leaves the routing."""
    keep: int = number(1, "[0, inf)")
    """Each token's first so many experts by weight are executed wherever they are."""


class CacheAware(RoutingPolicy):
    """z' = z + lambda * delta * [on the device]: z' chooses by the layer's own rule, z gives the weights.

    delta is the running mean, per layer, of the range max z - min z of a token's logits, this step's among them. Tokens
    that z' routes as z does keep ids and weights to the bit.

    Raises:
        ExpertcastError: more experts are kept than a token has.
    """

    name = "cache_aware"
    config_class = CacheAwareConfig
    config: CacheAwareConfig

    def __init__(self, config: CacheAwareConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        if config.keep > shape.top_k:
            raise ExpertcastError(f"keep={config.keep}: a token has {shape.top_k} experts, give 0 to {shape.top_k}")
        self._range: dict[int, Tensor] = {}
        """Mean range by layer, where the logits are."""
        self._tokens: dict[int, int] = {}

    def route(self, routed: Routed) -> tuple[Tensor, Tensor]:
        logits_TE = routed.logits_TE.float()
        guard_TJ = routed.ids_TK.gather(-1, routed.weights_TK.topk(self.config.keep, dim=-1).indices)
        biased_TE = self._biased(logits_TE, routed.cached_E, routed.layer.index)
        first_T1 = biased_TE.amax(dim=-1, keepdim=True) + 1.0
        chosen_TK, _ = routed.layer.route(biased_TE.scatter(-1, guard_TJ, first_T1.expand(-1, self.config.keep)))
        chosen_TK = _with_guard(chosen_TK, guard_TJ, biased_TE)
        same_T1 = (chosen_TK.sort(dim=-1).values == routed.ids_TK.sort(dim=-1).values).all(dim=-1, keepdim=True)
        ids_TK = torch.where(same_T1, routed.ids_TK, chosen_TK)
        weights_TK = weights_over(routed.layer, routed.logits_TE, ids_TK).to(routed.weights_TK.dtype)
        return ids_TK, torch.where(same_T1, routed.weights_TK, weights_TK)

    def _biased(self, logits_TE: Tensor, cached_E: Tensor, layer: int) -> Tensor:
        range_T1 = logits_TE.amax(dim=-1, keepdim=True) - logits_TE.amin(dim=-1, keepdim=True)
        bonus = self.config.strength * self._mean_range(layer, range_T1)
        # a bonus above the token's own range puts every cached expert first; more would only cost precision
        return logits_TE + torch.minimum(bonus, range_T1 + 1.0) * cached_E

    def _mean_range(self, layer: int, range_T1: Tensor) -> Tensor:
        self._tokens[layer] = self._tokens.get(layer, 0) + len(range_T1)
        mean = self._range.get(layer, range_T1.new_zeros(()))
        self._range[layer] = mean + (range_T1 - mean).sum() / self._tokens[layer]
        return self._range[layer]


def _with_guard(chosen_TK: Tensor, guard_TJ: Tensor, biased_TE: Tensor) -> Tensor:
    """The choice with the guarded experts in it, in place of those with the lowest logits.

    The layer's rule itself keeps them, ranked first, unless it chooses by something beside the logits.
    """
    score_TE = torch.full_like(biased_TE, float("-inf"))
    score_TE = score_TE.scatter(-1, chosen_TK, biased_TE.gather(-1, chosen_TK))
    score_TE = score_TE.scatter(-1, guard_TJ, float("inf"))
    guarded_TK = score_TE.topk(chosen_TK.shape[-1], dim=-1).indices
    complete_T1 = (guard_TJ[:, :, None] == chosen_TK[:, None, :]).any(dim=-1).all(dim=-1, keepdim=True)
    return torch.where(complete_T1, chosen_TK, guarded_TK)


@dataclass(frozen=True, kw_only=True)
class BudgetConfig(PolicyConfig):
    """How many experts a token executes."""

    k_max: int | None = number(None, "[1, inf)")
    """Most experts that a token executes (none: the model's K)."""


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


ROUTING: PolicyRegistry[RoutingPolicy] = PolicyRegistry("routing policy", Standard, CacheAware, Budget)
