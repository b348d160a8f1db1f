"""Routers of every family, and the routings they give."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors.view import MoELayer
from expertcast.runtime.policies.base import CacheShape
from expertcast.runtime.policies.routing import ROUTING, Routed, RoutingPolicy
from tests.families.models import tiny_model


def router_of(family: str, dtype: torch.dtype = torch.float32) -> MoELayer:
    return find_moe_layers(tiny_model(family, dtype))[0]


def routed(layer: MoELayer, logits_TE: Tensor, cached: Collection[int], available: int = 0) -> Routed:
    ids_TK, weights_TK = layer.route(logits_TE)
    cached_E = torch.zeros(layer.num_experts, dtype=torch.bool)
    cached_E[list(cached)] = True
    return Routed(
        layer=layer,
        logits_TE=logits_TE,
        ids_TK=ids_TK,
        weights_TK=weights_TK,
        cached_E=cached_E,
        available=available,
    )


def logits(layer: MoELayer, tokens: int, seed: int = 0) -> Tensor:
    """As the layer's own router gives them."""
    hidden_TD = torch.randn(tokens, layer.hidden_size, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return layer.router_logits(hidden_TD.to(next(layer.router.parameters()).dtype))


def policy_of(text: str, layer: MoELayer) -> RoutingPolicy:
    shape = CacheShape(layers=4, experts=layer.num_experts, top_k=layer.top_k, slots=16)
    return ROUTING.choose(text).make(shape)
