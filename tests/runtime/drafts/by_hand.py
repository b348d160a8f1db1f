"""Quantised weights group by group, apart from the code that is tested."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from expertcast.predictors.view import MoELayer, MoEView
from expertcast.runtime.drafts.quantised import Views
from expertcast.runtime.storage.layout import expert_parameters


def resident_views(view: MoEView) -> Views:
    """The parameters of a model that holds its experts itself."""
    return lambda layer: {
        name: value.detach() for name, value in expert_parameters(view[layer].experts, view[layer].num_experts).items()
    }


def bf16(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.bfloat16))


def rounded_group(weights: list[float], bits: int) -> list[float]:
    """The weights that a group is rounded to: multiples of a scale by which its extreme is -8 (or 127) of them."""
    lowest = -(2 ** (bits - 1))
    scale = bf16(max(weights, key=abs) / (-8 if bits == 4 else 127)) or 1.0
    return [scale * min(max(round(weight / scale), lowest), -lowest - 1) for weight in weights]


def rounded_weights(weights_ENI: Tensor, bits: int) -> Tensor:
    """[E, N, I]: 4 bits in groups of 128, 64 or 32 inputs, 8 bits by output; as they are where no kernel takes them."""
    outputs, inputs = weights_ENI.shape[-2:]
    group = inputs if bits == 8 else next((size for size in (128, 64, 32) if inputs % size == 0), 0)
    if not group or outputs % (4 if bits == 8 else 16) or inputs % 32:
        return weights_ENI.float()
    rows = [rounded_group(row, bits) for row in weights_ENI.reshape(-1, group).tolist()]
    return torch.tensor(rows).view(weights_ENI.shape)


def rounded_experts(layer: MoELayer, bits: int) -> nn.Module:
    """The layer's experts in fp32 with rounded weights: what transformers' own kernel is to be run with."""
    experts: Any = copy.deepcopy(layer.experts).float()
    for name in ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj"):
        weights = getattr(experts, name).detach()
        lying = weights.mT if experts.is_transposed else weights
        found = rounded_weights(lying.contiguous(), bits)
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
