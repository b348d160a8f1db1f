"""Copies of experts in lower precisions: fewer bytes on the link, expanded to ordinary weights in the slot.

packed block   [ rows of all quantised parameters | parameters kept as they are ... ]   each at a multiple of 256 bytes

A row is a group of 64 weights, or of 32 if 64 does not divide a parameter's size. It is packed by the row-wise
quantisation of torch's embedding tables, with scale and offset after the codes: weight = scale * code + offset.

8 bits, row of 64   [ 64 codes           | scale, offset: float32 ]   9.0 bits a weight
4 bits              [ 32 bytes of codes  | scale, offset: float16 ]   4.5
2 bits              [ 16 bytes of codes  | scale, offset: float16 ]   2.5

R rows in a block, G weights in a row, N experts packed at once, L MoE layers, E routed experts per layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from expertcast.data.packed_experts import BLOCKS, INTERLEAVED
from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.storage.layout import PRECISIONS, BlockLayout, Field, aligned_bytes
from expertcast.runtime.storage.memory import HostMemory, PageLock

_GROUPS = (64, 32)
_BITS = {"int8": 8, "int4": 4, "int2": 2}
_CHUNK = 1 << 18
"""Approximate number of weights packed at a time. Temporaries then stay in a core's cache: 1.5 times as fast."""
_OPERATORS = {8: "embedding_bag_byte", 4: "embedding_bag_4bit", 2: "embedding_bag_2bit"}
_STARTS = (1.0, 0.6)
"""Fractions of a row's range from which the search for its best range starts."""
_FIT_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """Layout of one expert in a packed block."""

    full: BlockLayout
    bits: int
    group: int
    """G"""
    rows: int
    """R"""
    quantised: tuple[Field, ...]
    """Fields of the full block, in the order of their rows."""
    targets: tuple[tuple[int, int, torch.dtype], ...]
    """Offset, bytes and dtype of the ranges of the full block that the rows expand to; adjacent fields are merged."""
    kept: tuple[tuple[Field, int], ...]
    """Fields of the full block that are not quantised, with their offset in the packed block."""
    block_bytes: int
    """Bytes of one expert, padding included."""

    @classmethod
    def of(cls, layout: BlockLayout, precision: str) -> PackedLayout:
        """Return the packed layout of a full one. Biases, integers and sizes that no group divides are not quantised.

        Raises:
            ExpertcastError: the precision is unknown, or would not make these experts smaller.
        """
        if precision not in _BITS:
            raise ExpertcastError(f"unknown precision {precision!r}: choose from {', '.join(PRECISIONS)}")
        if any(field.name.endswith((BLOCKS, INTERLEAVED)) for field in layout.fields):
            raise ExpertcastError(f"these experts are packed already: {precision} copies would not make them smaller")
        bits = _BITS[precision]
        quantised = tuple(field for field in layout.fields if _can_quantise(field))
        group = next((g for g in _GROUPS if all(math.prod(field.shape) % g == 0 for field in quantised)), _GROUPS[-1])
        rows = sum(math.prod(field.shape) for field in quantised) // group
        offset = aligned_bytes(rows * row_bytes(bits, group))
        kept = []
        for field in layout.fields:
            if field not in quantised:
                kept.append((field, offset))
                offset = aligned_bytes(offset + field.nbytes)
        if offset >= layout.block_bytes:
            raise ExpertcastError(
                f"{precision} copies of these experts take {offset} bytes each, full ones {layout.block_bytes}: choose "
                "a lower precision, or none"
            )
        return cls(
            full=layout, bits=bits, group=group, rows=rows, quantised=quantised, targets=_targets(quantised),
            kept=tuple(kept), block_bytes=offset,
        )  # fmt: skip

    @property
    def rows_nbytes(self) -> int:
        """Bytes of all rows, which precede the unquantised fields."""
        return self.rows * row_bytes(self.bits, self.group)

    def pack(self, views: Mapping[str, Tensor], blocks: Tensor) -> None:
        """Quantise experts, given as parameters [N, ...] by name on the CPU, into blocks: uint8 [N, block_bytes]."""
        count = blocks.shape[0]
        weights = [views[field.name].reshape(count, -1, self.group).float() for field in self.quantised]
        rows = quantise(torch.cat(weights, dim=1).flatten(0, 1), self.bits)
        blocks[:, : self.rows_nbytes] = rows.view(count, -1)
        for field, offset in self.kept:
            raw = views[field.name].reshape(count, -1).contiguous().view(torch.uint8)
            blocks[:, offset : offset + field.nbytes] = raw

    def expand(self, packed: Tensor, block: Tensor) -> None:
        """Expand a packed block, uint8 [block_bytes], into a full one, uint8 [full.block_bytes], on the same device.

        `packed` may be the first bytes of `block`.
        """
        kept = packed[self.rows_nbytes :].clone() if self.kept else packed
        weights = dequantise(packed[: self.rows_nbytes].view(self.rows, -1), self.bits).flatten()
        start = 0
        for offset, nbytes, dtype in self.targets:
            end = start + nbytes // dtype.itemsize
            block[offset : offset + nbytes].view(dtype).copy_(weights[start:end])
            start = end
        for field, place in self.kept:
            place -= self.rows_nbytes
            block[field.offset : field.offset + field.nbytes] = kept[place : place + field.nbytes]


class PackedExperts:
    """Copies of all experts of a store in one lower precision, in host memory; `lock`, if given, page-locks it."""

    def __init__(self, layout: PackedLayout, layers: int, experts: int, lock: PageLock | None = None) -> None:
        self.layout = layout
        self.block_bytes = layout.block_bytes
        self._experts = experts
        self._memory = HostMemory(layers * experts * layout.block_bytes, lock)
        self._blocks = self._memory.bytes.view(layers * experts, layout.block_bytes)
        """Packed block of each expert, uint8 [L * E, block_bytes]."""

    def block(self, key: int) -> Tensor:
        """Return the packed block of one expert, uint8 [block_bytes]."""
        return self._blocks[key]

    def fill(self, layer: int, views: Mapping[str, Tensor]) -> None:
        """Pack one layer from its parameters [E, ...] by name."""
        layout, first = self.layout, layer * self._experts
        size = max(1, _CHUNK // (layout.rows * layout.group))
        for start in range(0, self._experts, size):
            end = min(start + size, self._experts)
            chunk = {name: view[start:end] for name, view in views.items()}
            layout.pack(chunk, self._blocks[first + start : first + end])

    def release(self) -> None:
        """Free the memory. A tensor that views it keeps it allocated."""
        self._blocks = torch.empty(0, dtype=torch.uint8)
        self._memory.release()


def _targets(fields: tuple[Field, ...]) -> tuple[tuple[int, int, torch.dtype], ...]:
    targets: list[tuple[int, int, torch.dtype]] = []
    for field in fields:
        if targets and targets[-1][2] == field.dtype and sum(targets[-1][:2]) == field.offset:
            targets[-1] = (targets[-1][0], targets[-1][1] + field.nbytes, field.dtype)
        else:
            targets.append((field.offset, field.nbytes, field.dtype))
    return tuple(targets)


def _can_quantise(field: Field) -> bool:
    return len(field.shape) > 1 and field.dtype.is_floating_point and math.prod(field.shape) % _GROUPS[-1] == 0


def dequantise(rows: Tensor, bits: int) -> Tensor:
    """Expand packed rows, uint8 [R, row bytes], to weights, float32 [R, G].

    Uses torch's operator on the CPU, and :func:`dequantise_plain`, with the same result, on other devices.
    """
    if rows.device.type == "cpu":
        unpacked: Tensor = getattr(torch.ops.quantized, _OPERATORS[bits] + "_unpack")(rows)
        return unpacked
    return dequantise_plain(rows, bits)


def dequantise_plain(rows: Tensor, bits: int) -> Tensor:
    """Reference for :func:`dequantise`, by operations that every device supports."""
    tail_dtype = _tail_dtype(bits)
    codes_bytes = rows.shape[1] - 2 * tail_dtype.itemsize
    codes, tail = rows[:, :codes_bytes], rows[:, codes_bytes:].view(tail_dtype).float()
    if bits < 8:  # the first weight of a byte is in its lowest bits
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=rows.device)
        codes = codes.unsqueeze(-1).bitwise_right_shift(shifts).bitwise_and_((1 << bits) - 1).flatten(1)
    return torch.addcmul(tail[:, 1:], codes.float(), tail[:, :1])  # rounds once, as torch's operator does


def quantise(weights_RG: Tensor, bits: int) -> Tensor:
    """Pack weights, float32 [R, G], into rows, uint8 [R, row bytes].

    torch's operator spreads the codes over a row's whole range. With 16 or 4 levels, a smaller range often has a lower
    squared error. So each row is packed with several ranges, and the one with the lowest error is used. (The operator's
    `optimized_qparams` search takes ten times as long and hardly improves 4 levels.)
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
    """Fit the lowest and highest level of each row, [R, 1]: alternate nearest codes and a least-squares line."""
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
    """Dtype of a row's scale and offset."""
    return torch.float32 if bits == 8 else torch.float16


def row_bytes(bits: int, group: int) -> int:
    """Bytes of a row of `group` weights."""
    return group * bits // 8 + 2 * _tail_dtype(bits).itemsize
