"""How often each exponent occurs, and what that allows a lossless codec to save (row E1)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from expertcast.predictors.errors import ExpertcastError

_SHIFTS = {torch.bfloat16: 7, torch.float16: 10}
"""Bits below the exponent."""
_MASKS = {torch.bfloat16: 0xFF, torch.float16: 0x1F}
_BITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ExponentHistogram:
    """Of 16-bit floats of one type."""

    counts: Tensor
    """int64 [256] (bf16) or [32] (fp16), by the exponent's bits as they are stored."""

    @property
    def entropy(self) -> float:
        """H, bits that an exponent says on average; 0 for no weights."""
        p = self.counts[self.counts > 0].double() / self.counts.sum()
        return float(-(p * p.log2()).sum())

    @property
    def bound(self) -> float:
        """The least share of the bytes when every exponent is coded by itself, all by one table, and the rest stays:
        (8 + H) / 16 for bf16.

        The paper's three models have bounds of .6657, .6602 and .6596 (trap 7); its 68% for zstd is of split planes.
        """
        exponent_bits = len(self.counts).bit_length() - 1
        return (_BITS - exponent_bits + self.entropy) / _BITS


def exponent_histogram(tensors: Iterable[Tensor]) -> ExponentHistogram:
    """Count the exponents of some tensors, which are looked at one after another.

    Raises:
        ExpertcastError: there is none, or one of another type than bf16 and fp16, or than the first.
    """
    counts: Tensor | None = None
    dtype = None
    for tensor in tensors:
        dtype = tensor.dtype if dtype is None else dtype
        if tensor.dtype != dtype or dtype not in _SHIFTS:
            raise ExpertcastError(f"exponents of {tensor.dtype}: give tensors of one type, bf16 or fp16")
        mask = _MASKS[dtype]
        for part in torch.split(tensor.detach(), 1):  # counting takes copies
            exponents = part.contiguous().view(torch.int16).flatten() >> _SHIFTS[dtype] & mask
            found = torch.bincount(exponents, minlength=mask + 1).cpu()
            counts = found if counts is None else counts + found
    if counts is None:
        raise ExpertcastError("an exponent histogram of no tensors: give at least one")
    return ExponentHistogram(counts=counts)
