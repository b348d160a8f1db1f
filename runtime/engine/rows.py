"""Token-expert pairs: the order in which kernels compute them, and what becomes of their outputs.

T tokens, D hidden size, K experts per token, P = T x K pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

_COMBINED = 1024
"""Tokens whose experts' outputs are weighted at once."""


def row_order(ids_TK: Tensor) -> Tensor:
    """Order [P] in which the kernels compute token-expert pairs: by expert, ties as torch's sort leaves them."""
    return torch.sort(ids_TK.reshape(-1)).indices


def combine(output_PD: Tensor, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
    """Weighted sum over K as the kernels take it: the same products, the same reduction; for some tokens at a time."""
    tokens, top_k = weights_TK.shape
    if tokens > _COMBINED:
        parts = zip(torch.split(output_PD, _COMBINED * top_k), torch.split(weights_TK, _COMBINED), strict=True)
        return torch.cat([combine(*part, dtype) for part in parts])
    weighted_PD = output_PD * weights_TK.reshape(-1, 1)
    return weighted_PD.view(tokens, top_k, -1).sum(dim=1).to(dtype)
