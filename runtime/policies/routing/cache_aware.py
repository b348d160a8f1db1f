"""Experts that are on the device are preferred (rows A3 and A4, trap 7).

T tokens, E routed experts per layer, K experts per token, J guarded experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.routing_rule import weights_over
from expertcast.runtime.policies.registry import CacheShape, PolicyConfig
from expertcast.runtime.policies.routing.base import Routed, RoutingPolicy


@dataclass(frozen=True, kw_only=True)
class CacheAwareConfig(PolicyConfig):
    """How strongly experts on the device are preferred."""

    strength: float = 0.2
    """Lambda: the bonus of an expert on the device, as a share of the logits' usual range; 0 leaves the routing."""
    keep: int = 1
    """Each token's first so many experts by weight are executed wherever they are."""

    def __post_init__(self) -> None:
        if self.strength < 0:
            raise ExpertcastError(f"strength={self.strength}: give 0 or more; .1 to .5 worked best in the literature")
        if self.keep < 0:
            raise ExpertcastError(f"keep={self.keep}: give 0 or more experts, up to the model's K")


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
