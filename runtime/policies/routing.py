"""Routing policies: the experts that a layer executes, depending on the cache.

T tokens, E routed experts per layer, K experts per token, J experts per token that are always executed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import MoELayer, renormalises, weights_over
from expertcast.runtime.policies.base import CacheShape, Policy, PolicyConfig, PolicyRegistry


@dataclass(slots=True, kw_only=True)
class RouterOutput:
    """Output of a layer's router, with the state of the cache."""

    layer: MoELayer
    logits_TE: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    cached: Collection[int]
    """Resident experts."""
    available: int
    """Number of slots that misses of the layer can use without an eviction (C_avail in ActiveEvict, eq. 18); E where
    pre-eviction had no forecast for the layer."""
    read: Callable[..., list[Any]]
    """Returns the values of tensors as lists. On a GPU copies go on meanwhile, which `Tensor.tolist` would hold up."""

    def cached_E(self) -> Tensor:
        """Return whether each expert is resident (bool), on the device of the logits."""
        cached_E = torch.zeros(self.logits_TE.shape[-1], dtype=torch.bool)
        cached_E[list(self.cached)] = True
        return cached_E.to(self.logits_TE.device)


class RoutingPolicy(Policy):
    """Base class of routing policies, which may replace the experts that the router chose.

    The shape of ids and weights stays [T, K]; an expert with weight 0 is not executed.
    """

    lossy: ClassVar[bool] = True
    """Whether the output may differ from the resident model's."""

    @abstractmethod
    def route(self, routed: RouterOutput) -> tuple[Tensor, Tensor] | None:
        """Return (ids [T, K], weights [T, K]) to execute, or None for the router's own.

        The expert id beside a weight of 0 is arbitrary.
        """


class Standard(RoutingPolicy):
    """Executes the experts that the router chose."""

    name = "standard"
    lossy = False

    def route(self, routed: RouterOutput) -> None:
        del routed


@dataclass(frozen=True, kw_only=True)
class CacheAwareConfig(PolicyConfig):
    """Options of :class:`CacheAware`."""

    strength: Annotated[float, Field(ge=0)] = 0.2
    """Lambda: bonus of a resident expert, as a share of the mean range of the logits; 0 keeps the routing."""
    keep: Annotated[int, Field(ge=0)] = 1
    """Number of experts per token, heaviest first, that are executed whether they are resident or not."""


class CacheAware(RoutingPolicy):
    """Adds a bonus to the logits of resident experts: z' = z + lambda * delta * [resident].

    The layer's routing rule chooses experts by z' and computes their weights from z. delta is the running mean per
    layer of a token's logit range, max z - min z, including the current step. A token for which z' chooses the same
    experts as z keeps its ids and weights bit for bit.

    Source: Skliar et al. (2025); SpecMD, eq. 1.

    Raises:
        ExpertcastError: `keep` exceeds the model's K.
    """

    name = "cache_aware"
    config_class = CacheAwareConfig
    config: CacheAwareConfig

    def __init__(self, config: CacheAwareConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        if config.keep > shape.top_k:
            raise ExpertcastError(f"keep={config.keep}: a token has {shape.top_k} experts, give 0 to {shape.top_k}")
        self._range: dict[int, Tensor] = {}
        """Mean range of the logits by layer, on the device of the logits."""
        self._tokens: dict[int, int] = {}

    def route(self, routed: RouterOutput) -> tuple[Tensor, Tensor]:
        logits_TE = routed.logits_TE.float()
        guard_TJ = routed.ids_TK.gather(-1, routed.weights_TK.topk(self.config.keep, dim=-1).indices)
        range_T1 = logits_TE.amax(dim=-1, keepdim=True) - logits_TE.amin(dim=-1, keepdim=True)
        bonus = self.config.strength * self._mean_range(routed.layer.index, range_T1)
        # a bonus above the token's own range already ranks every resident expert first; a larger one loses precision
        biased_TE = logits_TE + torch.minimum(bonus, range_T1 + 1.0) * routed.cached_E()
        first_T1 = biased_TE.amax(dim=-1, keepdim=True) + 1.0
        chosen_TK, _ = routed.layer.route(biased_TE.scatter(-1, guard_TJ, first_T1.expand(-1, self.config.keep)))
        chosen_TK = _with_guard(chosen_TK, guard_TJ, biased_TE)
        same_T1 = (chosen_TK.sort(dim=-1).values == routed.ids_TK.sort(dim=-1).values).all(dim=-1, keepdim=True)
        ids_TK = torch.where(same_T1, routed.ids_TK, chosen_TK)
        weights_TK = weights_over(routed.layer, routed.logits_TE, ids_TK).to(routed.weights_TK.dtype)
        return ids_TK, torch.where(same_T1, routed.weights_TK, weights_TK)

    def _mean_range(self, layer: int, range_T1: Tensor) -> Tensor:
        self._tokens[layer] = self._tokens.get(layer, 0) + len(range_T1)
        mean = self._range.get(layer, range_T1.new_zeros(()))
        self._range[layer] = mean + (range_T1 - mean).sum() / self._tokens[layer]
        return self._range[layer]


def _with_guard(chosen_TK: Tensor, guard_TJ: Tensor, biased_TE: Tensor) -> Tensor:
    """Replace the chosen experts with the lowest logits by guarded experts that the routing rule left out.

    This happens only to rules that use more than the logits, since guarded experts have the highest ones.
    """
    score_TE = torch.full_like(biased_TE, float("-inf"))
    score_TE = score_TE.scatter(-1, chosen_TK, biased_TE.gather(-1, chosen_TK))
    score_TE = score_TE.scatter(-1, guard_TJ, float("inf"))
    guarded_TK = score_TE.topk(chosen_TK.shape[-1], dim=-1).indices
    complete_T1 = (guard_TJ[:, :, None] == chosen_TK[:, None, :]).any(dim=-1).all(dim=-1, keepdim=True)
    return torch.where(complete_T1, chosen_TK, guarded_TK)


class Budget(RoutingPolicy):
    """Limits each token to its heaviest experts, such that the misses fit the available slots.

    k = max{k <= K: u(k) <= available}, with u(k) the number of absent experts among the k heaviest. The tokens of a
    step share the available slots in order; an expert that one token loads is resident for the next one. At least one
    expert is executed, also where eq. 20 allows none. With pre-eviction, layers without a forecast have no limit:
    nothing freed slots for them. If the router normalises the weights, those of the remaining experts are normalised
    again (eq. 4).

    Source: ActiveEvict, eq. 4 and 18 to 21, with k_max = K.
    """

    name = "budget"

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._renormalises: dict[int, bool] = {}

    def route(self, routed: RouterOutput) -> tuple[Tensor, Tensor] | None:
        order_TK = routed.weights_TK.argsort(dim=-1, descending=True, stable=True)
        (ranked,) = routed.read(routed.ids_TK.gather(-1, order_TK))
        counts = _counts(ranked, set(routed.cached), routed.available)
        if all(count == len(row) for count, row in zip(counts, ranked, strict=True)):
            return None
        count_T1 = torch.tensor(counts, device=order_TK.device)[:, None]
        runs_TK = order_TK.argsort(dim=-1) < count_T1  # the inverse permutation is the rank of each expert
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


def _counts(ranked: Sequence[Sequence[int]], cached: set[int], available: int) -> list[int]:
    """Return the number of experts, heaviest first, that each token executes; add the loaded experts to `cached`."""
    counts = []
    for row in ranked:
        count = 0
        for expert in row:
            if expert not in cached:
                if count and not available:
                    break
                available = max(0, available - 1)
                cached.add(expert)
            count += 1
        counts.append(count)
    return counts


ROUTING: PolicyRegistry[RoutingPolicy] = PolicyRegistry("routing policy", Standard, CacheAware, Budget)
