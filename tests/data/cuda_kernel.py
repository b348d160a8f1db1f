"""CUDA's 4-bit kernel and its order of codes, on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from expertcast.data import packed_experts


def convert(octets: Tensor, tiles: int) -> Tensor:
    """Stand in for `torch._convert_weight_to_int4pack`: uint8 [N, I/2], the first of two codes in the high bits.

    The words have the kernel's shape and 8 rows of outputs by 16 x tiles inputs lie together, in an order of its own.
    """
    assert octets.is_contiguous()
    assert octets.dtype == torch.uint8
    outputs, half = octets.shape
    blocks = octets.view(outputs // 8, 8, half // (8 * tiles), 8 * tiles).transpose(1, 2)
    words = blocks.flip(-2).contiguous().view(torch.int32).view(outputs // 8, -1, 32, tiles // 2)
    assert words.shape == torch.ops.aten._convert_weight_to_int4pack(octets.to("meta"), tiles).shape
    return words


def multiply(rows_PI: Tensor, words: Tensor, group: int, pairs: Tensor) -> Tensor:
    """Stand in for `torch._weight_int4pack_mm`, with its checks: weights in bf16, sums in float32, bf16 [P, N]."""
    (_, inputs), tiles = rows_PI.shape, 2 * words.shape[3]
    assert rows_PI.is_contiguous()
    assert words.is_contiguous()
    assert rows_PI.dtype == pairs.dtype == torch.bfloat16
    assert words.shape[1:3] == (inputs // (16 * tiles), 32)
    outputs = 8 * words.shape[0]
    assert pairs.shape == (inputs // group, outputs, 2)
    assert group in (32, 64, 128, 256)
    blocks = words.view(torch.uint8).view(outputs // 8, -1, 8, 8 * tiles).flip(-2)
    octets = blocks.transpose(1, 2).reshape(outputs, inputs // 2)
    codes = torch.stack([octets >> 4, octets & 15], -1).flatten(1).float() - 8
    scales, zeros = (each.mT.float().repeat_interleave(group, 1) for each in pairs.unbind(-1))
    weights_NI = (codes * scales + zeros).bfloat16()
    return (rows_PI.float() @ weights_NI.float().T).bfloat16()


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """Let forms for CUDA compute on the CPU."""
    patch.setattr(torch, "_convert_weight_to_int4pack", convert)
    patch.setattr(torch, "_weight_int4pack_mm", multiply)
    patch.setattr(packed_experts, "_CUDA", "cpu")
