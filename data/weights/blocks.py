"""Blocks of ggml's types, written from the codes and scales of other formats.

    bytes of a block              weights of 32 inputs
    Q4_0    d, 16 codes           d (q - 8)
    Q4_1    d, m, 16 codes        d q + m
    Q8_0    d, 32 codes           d q, signed
    MXFP4   e, 16 codes           2^(e - 128) v[q]

Two codes of 4 bits are a byte: the low halves of a block's bytes are its first 16 codes. d and m are fp16.

R rows and C columns of a matrix, G groups of columns that share a scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from expertcast.predictors.messages import ExpertcastError

_BLOCK = 32
_FP16 = 2.0**-11
"""Largest relative error of a number that is rounded to fp16."""


def block_kind(bits: int, group: int, symmetric: bool) -> str | None:
    """Return the type that holds codes whose groups of columns share a scale; None if there is none."""
    if group % _BLOCK or bits not in (4, 8) or (bits == 8 and not symmetric):
        return None
    return "Q8_0" if bits == 8 else "Q4_0" if symmetric else "Q4_1"


def to_blocks(kind: str, code_RC: Tensor, scale_RG: Tensor, minimum_RG: Tensor | None = None) -> Tensor:
    """Return blocks, uint8 [R, bytes], of unsigned codes of 4 bits, or signed ones of 8.

    Args:
        kind: Q4_0, Q4_1 or Q8_0; weights are as above.
        code_RC: codes, uint8 or int8.
        scale_RG: scales.
        minimum_RG: the weights of code 0, for Q4_1; rounded to fp16, by less than half a hundredth of a step.

    Raises:
        ExpertcastError: scales that are no numbers of fp16.
    """
    scales = scale_RG.half()
    if not bool(((scales.float() - scale_RG.float()).abs() <= _FP16 * scale_RG.float().abs()).all()):
        raise ExpertcastError(f"scales are outside of fp16, which {kind} has: give experts='expanded'")
    repeats = code_RC.shape[1] // scales.shape[1] // _BLOCK
    numbers = [scales] if minimum_RG is None else [scales, minimum_RG.half()]
    heads = torch.stack(numbers, -1).repeat_interleave(repeats, 1).view(torch.uint8)  # [R, blocks, bytes]
    codes = code_RC.contiguous().view(torch.uint8).view(*heads.shape[:2], _BLOCK)
    return torch.cat((heads, codes if kind == "Q8_0" else _halves(codes)), dim=-1).flatten(1)


def mxfp4_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """Return MXFP4 as gpt-oss ships it, codes uint8 [..., R, J, 16] in order and exponents [..., R, J], as blocks
    [..., R, bytes]."""
    return torch.cat((scales.unsqueeze(-1), _halves(nibbles(codes))), dim=-1).flatten(-2)


def nibbles(octets: Tensor) -> Tensor:
    """Return the 4-bit codes in bytes, low half first: uint8 [..., n] -> [..., 2 n]."""
    wide = octets.to(torch.int16)
    return (wide << 4).bitwise_or_(wide).bitwise_and_(0x0F0F).view(torch.uint8)


def _halves(codes: Tensor) -> Tensor:
    """Join codes in pairs, [..., 32] -> [..., 16]: the first 16 are low halves."""
    first, second = codes.unflatten(-1, (2, -1)).unbind(-2)  # type: ignore[no-untyped-call]
    joined: Tensor = first | second << 4
    return joined
