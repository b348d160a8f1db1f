"""What one router has just done: what collection and the runtime are told, whatever model or engine runs it.

T tokens, B sequences, S tokens per sequence, D hidden size, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

RouterOutput: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""What a router returns: logits [T, E], weights [T, K] and ids [T, K]."""


@dataclass(slots=True, kw_only=True)
class RouterCall:
    """One router has just run."""

    layer: int
    """MoE layer index."""
    sequences: int
    """B"""
    tokens: int
    """S, tokens per sequence: 1 in a decode step."""
    residual_TD: Tensor
    """What entered the layer's norm."""
    router_input_TD: Tensor
    """What the norm made of it."""
    logits_TE: Tensor
    weights_TK: Tensor
    ids_TK: Tensor


def capturing() -> bool:
    """Whether this forward becomes a CUDA graph: always a decode step, and no value can be looked at."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
