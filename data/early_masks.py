"""Masks of early attention over whole texts, where each token reads the true past and its own stand-in.

B sequences, S tokens per sequence, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def beside(mask: Tensor | None, hidden_BSD: Tensor) -> Tensor:
    """The mask [B or 1, 1, S, 2S] of queries that read the true keys before their own position, and their own stand-in.

    `mask` is what the block was called with: None stands for causal attention.
    """
    length = hidden_BSD.shape[1]
    own_SS = torch.eye(length, dtype=torch.bool, device=hidden_BSD.device)
    if mask is None:
        before_SS = torch.ones_like(own_SS).tril(-1)
        return torch.cat([before_SS, own_SS], dim=1)[None, None]
    never = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    parts = [mask.masked_fill(own_SS, never), mask.masked_fill(~own_SS, never)]
    return torch.cat(parts, dim=-1)


def own_rows(mask: Tensor | None, hidden_BSD: Tensor) -> Tensor | None:
    """[B, S]: tokens that see themselves, as those of padding need not; None for all."""
    if mask is None:
        return None
    seen = mask if mask.dtype == torch.bool else mask == 0
    return seen.diagonal(dim1=-2, dim2=-1)[:, 0].expand(hidden_BSD.shape[:2])
