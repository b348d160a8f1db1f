"""Read blocks of GGUF's quantised kinds and of MXFP4 as codes and scales, without dequantising them.

    bytes of a block                                       weight
    Q4_0    d, 16 codes                                    d (q - 8)
    Q4_1    d, m, 16 codes                                 d q + m
    Q5_0    d, 4 fifth bits, 16 codes                      d (q - 16)
    Q5_1    d, m, 4 fifth bits, 16 codes                   d q + m
    Q8_0    d, 32 codes                                    d q
    Q4_K    d, m, 12 scales, 128 codes                     d s q - m t, scales s and t of six bits
    Q5_K    d, m, 12 scales, 32 fifth bits, 128 codes      d s q - m t
    IQ4_NL  d, 16 codes                                    d v[q]
    IQ4_XS  d, 2 and 4 scales, 128 codes                   d (s - 32) v[q]
    MXFP4   e, 16 codes                                    2^(e - 128) v[q]

Two codes of 4 bits are a byte; d and m are fp16; a group has 32 codes. A number is added to codes of more than 4 bits,
so that the middle code stands for a group's zero. Source: gguf-py's `quants.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from expertcast.data.packed_experts import MIDDLE, Coded, Coding

_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of MXFP4's codes."""
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FIVE_BITS = MIDDLE[8] - 16
"""Added to codes of 5 bits."""
Parts = tuple[Tensor, Tensor, Tensor | None]
"""Codes [..., n], scales and zeros [..., n / 32] of blocks."""


def coded_blocks(kind: str, octets: Tensor) -> Coded:
    """Return codes and scales of rows of blocks.

    Args:
        kind: one of `CODINGS`.
        octets: uint8 [..., bytes of a row].
    """
    size, coding, parts = _KINDS[kind]
    codes, scales, zeros = parts(torch.unflatten(octets, -1, (-1, size)))
    return Coded(coding.bits, codes.flatten(-2), scales.flatten(-2), None if zeros is None else zeros.flatten(-2))


def coded_mxfp4(blocks: Tensor, scales: Tensor) -> Coded:
    """Return codes and scales of MXFP4 as gpt-oss ships it.

    Args:
        blocks: uint8 [..., J, 16], codes in order.
        scales: exponents uint8 [..., J].
    """
    return Coded(8, _looked_up(nibbles(blocks).flatten(-2), _FP4), _exponential(scales), None)


def nibbles(octets: Tensor) -> Tensor:
    """Return the 4-bit codes in bytes, low half first: uint8 [..., n] -> [..., 2 n]."""
    wide = octets.to(torch.int16)
    return (wide << 4).bitwise_or_(wide).bitwise_and_(0x0F0F).view(torch.uint8)


def _float(blocks: Tensor, start: int) -> Tensor:
    return blocks[..., start : start + 2].view(torch.float16).float()


def _halves(octets: Tensor) -> Tensor:
    """Return all low halves of bytes, then all high ones: [..., n] -> [..., 2 n]."""
    eights = octets.contiguous().view(torch.int64)
    mask = 0x0F0F0F0F0F0F0F0F
    return torch.cat((eights & mask, (eights >> 4).bitwise_and_(mask)), dim=-1).view(torch.uint8)


def _bits(octets: Tensor) -> Tensor:
    """Return the bits of bytes, lowest first: [..., n] -> [..., 8 n]."""
    return ((octets.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2)


def _looked_up(codes: Tensor, values: tuple[int, ...]) -> Tensor:
    """Return 8-bit codes of the signed values that codes stand for."""
    table = torch.tensor(values, dtype=torch.int16).add_(MIDDLE[8]).to(torch.uint8)
    return table[codes.int()]


def _exponential(exponents: Tensor) -> Tensor:
    """Return 2^(e - 128), written as bits of float32, since the smallest two are subnormal."""
    e = exponents.int()
    return torch.where(e < 2, 0x200000 << e.clamp_max(1), (e - 1) << 23).view(torch.float32)


def _q4_0(blocks: Tensor) -> Parts:
    return _halves(blocks[..., 2:]), _float(blocks, 0), None


def _q4_1(blocks: Tensor) -> Parts:
    scales = _float(blocks, 0)
    return _halves(blocks[..., 4:]), scales, _float(blocks, 2) + 8 * scales


def _q5_0(blocks: Tensor) -> Parts:
    codes = _halves(blocks[..., 6:]).bitwise_or_(_bits(blocks[..., 2:6]) << 4)
    return codes.add_(_FIVE_BITS), _float(blocks, 0), None


def _q5_1(blocks: Tensor) -> Parts:
    codes, scales = _halves(blocks[..., 8:]).bitwise_or_(_bits(blocks[..., 4:8]) << 4), _float(blocks, 0)
    return codes.add_(_FIVE_BITS), scales, _float(blocks, 2) + 16 * scales


def _q8_0(blocks: Tensor) -> Parts:
    scales = _float(blocks, 0)
    return blocks[..., 2:] ^ 128, scales, 8 * scales  # from -128 to 127: 8 more than the middle allows


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and subtracted offsets, both float32 [..., 8]."""
    first, second, third = torch.unflatten(blocks[..., 4:16], -1, (3, 4)).unbind(-2)
    scales = torch.cat((first & 63, (third & 15) | (first >> 2) & 48), dim=-1)
    offsets = torch.cat((second & 63, (third >> 4) | (second >> 2) & 48), dim=-1)
    return _float(blocks, 0) * scales, _float(blocks, 2) * offsets


def _q4_k(blocks: Tensor) -> Parts:
    scales, offsets = _k_scales(blocks)
    return _halves(torch.unflatten(blocks[..., 16:], -1, (4, 32))).flatten(-2), scales, 8 * scales - offsets


def _q5_k(blocks: Tensor) -> Parts:
    scales, offsets = _k_scales(blocks)
    codes = _halves(torch.unflatten(blocks[..., 48:], -1, (4, 32))).flatten(-2)
    fifth = (blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8).unsqueeze(-1)) & 1
    return codes.bitwise_or_(fifth.flatten(-2) << 4).add_(_FIVE_BITS), scales, 16 * scales - offsets


def _iq4_nl(blocks: Tensor) -> Parts:
    return _looked_up(_halves(blocks[..., 2:]), _IQ4), _float(blocks, 0), None


def _iq4_xs(blocks: Tensor) -> Parts:
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)
    low = nibbles(blocks[..., 4:8])
    high = ((blocks[..., 2:4].unsqueeze(-1) >> shifts) & 3).flatten(-2)
    scales = _float(blocks, 0) * ((low | high << 4).float() - 32)
    return _looked_up(_halves(torch.unflatten(blocks[..., 8:], -1, (8, 16))).flatten(-2), _IQ4), scales, None


def _mxfp4(blocks: Tensor) -> Parts:
    return _looked_up(_halves(blocks[..., 1:]), _FP4), _exponential(blocks[..., :1]), None


_KINDS: dict[str, tuple[int, Coding, Callable[[Tensor], Parts]]] = {
    "Q4_0": (18, Coding(4, 32, True), _q4_0),
    "Q4_1": (20, Coding(4, 32, False), _q4_1),
    "Q5_0": (22, Coding(8, 32, True), _q5_0),
    "Q5_1": (24, Coding(8, 32, False), _q5_1),
    "Q8_0": (34, Coding(8, 32, False), _q8_0),
    "Q4_K": (144, Coding(4, 32, False), _q4_k),
    "Q5_K": (176, Coding(8, 32, False), _q5_k),
    "IQ4_NL": (18, Coding(8, 32, True), _iq4_nl),
    "IQ4_XS": (136, Coding(8, 32, True), _iq4_xs),
    "MXFP4": (17, Coding(8, 32, True), _mxfp4),
}
"""Bytes of a block, coding of its codes, and the function that reads it."""
CODINGS = {kind: coding for kind, (_, coding, _) in _KINDS.items()}
"""Codings of the kinds' codes after reading."""
