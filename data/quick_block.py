"""A block's attention for one token of each sequence by as few operations as it takes, up to rounding: for hints.

It is read from modules as most models have them (input norm; q, k, v and o projections; norms of q and k; rotary
positions), with weights folded and in fp32, and used only where it gives what the block gives.

B sequences, D hidden size, H heads of q, G of keys, C channels of a head, N = (H + 2 G) C, S tokens of the past.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import DynamicLayer

from expertcast.predictors.folded import norm_scale
from expertcast.predictors.view import MoELayer

_MOST_BYTES = 2**21
"""Of a block's folded weights. Where they are larger, reading them costs more than the operations that are saved."""
_AGAIN = 256
"""The first token, and one in so many, is compared with the block."""
_CLOSE = 2e-2
"""Largest error of the residual, in parts of its size."""


class QuickBlock:
    """The residual before a MoE layer's norm, from the input of the block that the layer stands in."""

    def __init__(self, layer: MoELayer) -> None:
        self._function = _function(layer)
        self._calls = 0

    def run(
        self, hidden_BD: Tensor, past: object, other: object, kwargs: dict[str, Any], own: Callable[..., Tensor | None]
    ) -> Tensor | None:
        """Return the residual [B, D], fp32 where it is not the block's own; None where that is None.

        Args:
            hidden_BD: stands for the block's input, fp32.
            past: the cache's layer.
            other: that of the block which has just run, which must not hold more tokens than this one will.
            kwargs: the block is called with.
            own: runs the block itself; `by_program` as of :meth:`expertcast.data.early.EarlyAttention.attend`.
        """
        positions, mask, rows = kwargs.get("position_embeddings"), kwargs.get("attention_mask"), len(hidden_BD)
        if self._function is None or not isinstance(positions, tuple) or not isinstance(mask, Tensor | None):
            return own()
        if not _plain(past, rows) or not _plain(other, rows) or past.keys.shape[2] + 1 < other.keys.shape[2]:
            return own()
        if mask is not None and mask.shape[-1] != past.keys.shape[2] + 1:
            return own()
        given = hidden_BD, past.keys, past.values, *positions, mask
        self._calls += 1
        if self._calls % _AGAIN != 1:
            return self._function(*given)
        expected = own(by_program=False)
        if expected is not None and not _near(self._function, given, expected):
            self._function = None
        return expected


def _plain(past: Any, sequences: int) -> TypeGuard[DynamicLayer]:
    """Whether it is a cache's layer that holds all tokens of so many sequences."""
    return type(past) is DynamicLayer and past.is_initialized and len(past.keys) == sequences


def _near(function: Callable[..., Tensor], given: tuple[Tensor | None, ...], expected: Tensor) -> bool:
    try:
        found = function(*given)
    except (RuntimeError, TypeError):  # positions of another form
        return False
    return bool((found - expected.view_as(found)).norm() <= _CLOSE * found.norm())


@torch.no_grad()
def _function(layer: MoELayer) -> Callable[..., Tensor] | None:
    """Return a function from input [B, D], keys and values [B, G, S, C], the positions' cos and sin [1 or B, 1, C] and
    mask [B, 1, 1, S + 1] or None; None: it is another block."""
    attention, norm = getattr(layer.decoder, "self_attn", None), getattr(layer.decoder, "input_layernorm", None)
    linear = [getattr(attention, f"{name}_proj", None) for name in "qkvo"]
    channels, scaling = getattr(attention, "head_dim", None), getattr(attention, "scaling", None)
    if norm is None or not all(type(each) is nn.Linear and each.bias is None for each in linear):
        return None
    weights = [each.weight for each in linear if each is not None]
    scale = norm_scale(norm, layer.hidden_size, weights[0])
    if channels is None or scaling is None or scale is None or 4 * sum(map(Tensor.numel, weights)) > _MOST_BYTES:
        return None
    norms = [getattr(attention, f"{name}_norm", None) for name in "qk"]
    scales = [None if each is None else norm_scale(each, channels, weights[0]) for each in norms]
    heads = [len(weight) // channels for weight in weights[:3]]
    map_DN = (torch.cat(weights[:3]).float() * scale[0]).t().contiguous()
    out_XD, floor = weights[3].float().t().contiguous(), scale[1]
    sign_C = torch.ones(channels, device=map_DN.device)
    sign_C[: channels // 2] = -1.0
    own_HC = _scales(scales, heads)
    if own_HC is None and norms != [None, None]:
        return None

    def run(
        hidden_BD: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None
    ) -> Tensor:  # fmt: skip
        size_B1 = torch.hypot(torch.linalg.vector_norm(hidden_BD, dim=1, keepdim=True), floor)
        made = (torch.mm(hidden_BD, map_DN) / size_B1).view(-1, sum(heads), 1, channels)
        both, value = made.split_with_sizes([heads[0] + heads[1], heads[2]], dim=1)
        if own_HC is not None:
            both = both / torch.linalg.vector_norm(both, dim=3, keepdim=True) * own_HC
        turned = torch.roll(both, channels // 2, 3)
        both = torch.addcmul(both * cos.unsqueeze(1), turned, (sin * sign_C).unsqueeze(1))
        query, key = both.split_with_sizes(heads[:2], dim=1)
        output = functional.scaled_dot_product_attention(
            query, torch.cat([keys, key], dim=2), torch.cat([values, value], dim=2), scale=scaling,
            attn_mask=mask if mask is None or mask.dtype == torch.bool else mask.to(query.dtype),
            enable_gqa=heads[0] != heads[1],
        )  # fmt: skip
        return torch.addmm(hidden_BD, output.view(len(hidden_BD), -1), out_XD)

    return run


def _scales(scales: list[tuple[Tensor, Tensor] | None], heads: list[int]) -> Tensor | None:
    """[H + G, 1, C] by which normalised q and k are multiplied."""
    rows = [scale[0].expand(count, 1, -1) for scale, count in zip(scales, heads, strict=False) if scale is not None]
    return torch.cat(rows) if len(rows) == 2 else None
