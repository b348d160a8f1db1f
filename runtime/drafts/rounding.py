"""Symmetric rounding of weights to a few bits, in groups along the input dimension (rows C1, C12).

weight = scale * code. A group's weight of largest magnitude becomes the lowest code, -8 of 4 bits and -128 of 8,
whatever its sign: scales may be negative, and no code is left unused. Scales are bf16 values, which is what torch's
kernels take; codes are chosen for the scale as it is after rounding.

N outputs, I inputs, G inputs in a group, J = I // G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GROUPS = (128, 64, 32)


def group_of(inputs: int, bits: int) -> int | None:
    """Inputs that share a scale: of 4 bits 128, or 64 or 32 where that does not divide; None where none does.

    Of 8 bits all inputs of an output share one, as torch's kernel wants it.
    """
    if bits == 8:
        return inputs
    return next((group for group in _GROUPS if inputs % group == 0), None)


def scales_of(weights: Tensor, bits: int) -> Tensor:
    """Scales [...] of groups [..., G], float32 with values of bf16; 1 for a group of zeros."""
    extreme = weights.gather(-1, weights.abs().argmax(dim=-1, keepdim=True)).squeeze(-1).float()
    scales = (extreme / -(1 << (bits - 1))).bfloat16().float()
    return torch.where(scales == 0, torch.ones_like(scales), scales)


def codes_of(weights: Tensor, scales: Tensor, bits: int) -> Tensor:
    """The nearest codes, float32; `scales` must broadcast to the weights."""
    top = 1 << (bits - 1)
    return (weights.float() / scales).round_().clamp_(-top, top - 1)


def rounded(weights: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """To nearest: codes, int8 [..., N, I], and scales, float32 [..., N, J], of weights [..., N, I]."""
    groups = weights.reshape(*weights.shape[:-1], -1, group)
    scales = scales_of(groups, bits)
    return codes_of(groups, scales.unsqueeze(-1), bits).flatten(-2).to(torch.int8), scales


def expanded(codes: Tensor, scales: Tensor) -> Tensor:
    """The weights, float32 [..., N, I], that codes [..., N, I] and scales [..., N, J] stand for."""
    group = codes.shape[-1] // scales.shape[-1]
    return codes.float() * scales.float().repeat_interleave(group, dim=-1)
