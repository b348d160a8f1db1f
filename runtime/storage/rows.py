"""Rows of weights in 8, 4 or 2 bits, by the row-wise quantisation that torch's embedding tables use.

A row carries its scale and offset behind the codes: weight = scale * code + offset.

8 bits, row of 64   [ 64 codes           | scale, offset: float32 ]   9.0 bits a weight
4 bits              [ 32 bytes of codes  | scale, offset: float16 ]   4.5
2 bits              [ 16 bytes of codes  | scale, offset: float16 ]   2.5

R rows, G weights in a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

_OPERATORS = {8: "embedding_bag_byte", 4: "embedding_bag_4bit", 2: "embedding_bag_2bit"}
_STARTS = (1.0, 0.6)
"""Shares of a row's range that the search for the best one starts from."""
_FIT_STEPS = 5


def dequantise(rows: Tensor, bits: int) -> Tensor:
    """Weights of some rows: float32 [R, G] of uint8 [R, row bytes].

    On the CPU by torch's own operator, elsewhere by :func:`dequantise_plain`, which gives the same.
    """
    if rows.device.type == "cpu":
        unpacked: Tensor = getattr(torch.ops.quantized, _OPERATORS[bits] + "_unpack")(rows)
        return unpacked
    return dequantise_plain(rows, bits)


def dequantise_plain(rows: Tensor, bits: int) -> Tensor:
    """The same by operations that every device has."""
    tail_dtype = _tail_dtype(bits)
    codes_bytes = rows.shape[1] - 2 * tail_dtype.itemsize
    codes, tail = rows[:, :codes_bytes], rows[:, codes_bytes:].view(tail_dtype).float()
    if bits < 8:  # the first weight of a byte lies in its lowest bits
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=rows.device)
        codes = codes.unsqueeze(-1).bitwise_right_shift(shifts).bitwise_and_((1 << bits) - 1).flatten(1)
    return torch.addcmul(tail[:, 1:], codes.float(), tail[:, :1])  # rounds once, as torch's operator does


def quantise(weights_RG: Tensor, bits: int) -> Tensor:
    """uint8 [R, row bytes] of float32 [R, G].

    torch's operator spans a row's whole range. With 16 levels and with 4, codes of a smaller range are nearer to the
    weights: every row is packed for some ranges, and the one with the smallest squared error is taken. (The operator's
    own search, `optimized_qparams`, takes ten times as long and does next to nothing for 4 levels.)
    """
    pack = getattr(torch.ops.quantized, _OPERATORS[bits] + "_prepack")
    best: Tensor = pack(weights_RG)
    if bits == 8:
        return best
    error_R = _errors(best, weights_RG, bits)
    for share in _STARTS:
        low_R, high_R = _fitted_range(weights_RG, 1 << bits, share)
        rows = pack(weights_RG.clamp(low_R, high_R))
        other_R = _errors(rows, weights_RG, bits)
        better_R = other_R < error_R
        best = torch.where(better_R[:, None], rows, best)
        error_R = torch.where(better_R, other_R, error_R)
    return best


def _errors(rows: Tensor, weights_RG: Tensor, bits: int) -> Tensor:
    return (dequantise(rows, bits) - weights_RG).square_().sum(dim=1)


def _fitted_range(weights_RG: Tensor, levels: int, share: float) -> tuple[Tensor, Tensor]:
    """[R, 1] lowest and highest level: by turns the nearest codes, and the line through them of least squares."""
    low_R, high_R = weights_RG.amin(dim=1, keepdim=True), weights_RG.amax(dim=1, keepdim=True)
    middle_R, half_R = (low_R + high_R) / 2, (high_R - low_R) / 2 * share
    offset_R, scale_R = middle_R - half_R, 2 * half_R / (levels - 1)
    mean_R = weights_RG.mean(dim=1, keepdim=True)
    tiny = torch.finfo(torch.float32).tiny
    for _ in range(_FIT_STEPS):
        codes_RG = weights_RG.sub(offset_R).div_(scale_R.clamp_min(tiny)).round_().clamp_(0, levels - 1)
        code_mean_R = codes_RG.mean(dim=1, keepdim=True)
        codes_RG -= code_mean_R
        spread_R = codes_RG.square().sum(dim=1, keepdim=True)
        scale_R = (codes_RG * weights_RG).sum(dim=1, keepdim=True) / spread_R.clamp_min(tiny)
        offset_R = mean_R - scale_R * code_mean_R
    return offset_R, offset_R + scale_R * (levels - 1)


def _tail_dtype(bits: int) -> torch.dtype:
    """Of a row's scale and offset."""
    return torch.float32 if bits == 8 else torch.float16


def row_bytes(bits: int, group: int) -> int:
    """Bytes of a row of `group` weights."""
    return group * bits // 8 + 2 * _tail_dtype(bits).itemsize
