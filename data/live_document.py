"""A request to a server as a document of traces. T tokens, D hidden size, L MoE layers, E routed experts per layer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from expertcast.data.batch import TraceBatch


@dataclass(slots=True, kw_only=True)
class LiveDocument:
    """What a request showed of a model."""

    hash: str
    """:func:`prompt_hash`"""
    token_T: Tensor
    residual_TLD: Tensor
    """bf16, on the CPU."""
    logits_TLE: Tensor
    """On the CPU."""

    def rows(self, index: int) -> tuple[TraceBatch, Tensor]:
        """As a shard takes them, under this number, with the tokens' ids."""
        tokens = len(self.token_T)
        batch = TraceBatch(
            residual_TLD=self.residual_TLD,
            logits_TLE=self.logits_TLE,
            document_T=torch.full((tokens,), index),
            position_T=torch.arange(tokens),
        )
        return batch, self.token_T


def prompt_hash(token_ids: Sequence[int]) -> str:
    """What a request's document is known by: the first 64 bits of the SHA-256 of its prompt's ids, in hexadecimal."""
    return hashlib.sha256(b"tokens" + np.asarray(token_ids, dtype="<i4").tobytes()).hexdigest()[:16]
