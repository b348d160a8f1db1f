"""Experts rounded to ggml's blocks and expanded, for transformers' own kernel."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from expertcast.data import ggml
from expertcast.data.packed_experts import form_for
from expertcast.predictors.view import MoELayer, MoEView
from expertcast.runtime.storage.layout import expert_parameters


def resident_views(view: MoEView) -> Callable[[int], Mapping[str, Tensor]]:
    """The parameters of a model that holds its experts itself."""
    return lambda layer: {
        name: value.detach() for name, value in expert_parameters(view[layer].experts, view[layer].num_experts).items()
    }


def rounded_experts(layer: MoELayer, bits: int) -> nn.Module:
    """The layer's experts in fp32 with rounded weights: what transformers' own kernel is to be run with."""
    experts: Any = copy.deepcopy(layer.experts).float()
    for name in ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj"):
        weights = getattr(experts, name).detach()
        ((kind, _),) = form_for(experts, weights, bits, rest="BF16").pieces
        found = ggml.dequantise(kind, ggml.quantise(kind, weights.mT if experts.is_transposed else weights))
        getattr(experts, name).data = (found.mT if experts.is_transposed else found).contiguous()
    made: nn.Module = experts
    return made


def step(tokens: int, width: int, experts: int, top_k: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [T, D], ids [T, K] of K experts each, and weights [T, K], fp32."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(experts, generator=draw)[:top_k] for _ in range(tokens)])
    return torch.randn(tokens, width, generator=draw), ids, torch.rand(tokens, top_k, generator=draw)


def distance(found: Tensor, expected: Tensor) -> float:
    """Return the relative distance by norm."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())
