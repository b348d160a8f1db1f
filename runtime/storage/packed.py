"""Copies of experts in less than full precision: fewer bytes on the link, ordinary weights again in the slot.

packed block   [ rows of all quantised parameters | parameters kept as they are ... ]   each at a multiple of 256 bytes

A row is a group of 64 weights, 32 where 64 does not divide (:mod:`expertcast.runtime.storage.rows`).
R rows in a block, G weights in a row, N experts packed at once, L MoE layers, E routed experts per layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.storage.host_memory import HostMemory, PageLock
from expertcast.runtime.storage.layout import ALIGNMENT, BlockLayout, Field
from expertcast.runtime.storage.precision import PRECISIONS
from expertcast.runtime.storage.rows import dequantise, quantise, row_bytes

_GROUPS = (64, 32)
_BITS = {"int8": 8, "int4": 4, "int2": 2}
_CHUNK = 1 << 18
"""Weights packed at once: temporaries that stay in a core's cache make it half as fast again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """How one expert lies in a packed block."""

    full: BlockLayout
    bits: int
    group: int
    """G"""
    rows: int
    """R"""
    quantised: tuple[Field, ...]
    """Fields of the full block, in the order of their rows."""
    targets: tuple[tuple[int, int, torch.dtype], ...]
    """Offset and bytes of what the rows expand to in the full block: fields that lie side by side are one."""
    kept: tuple[tuple[Field, int], ...]
    """Fields of the full block that stay as they are, with their offset here."""
    block_bytes: int
    """Bytes of one expert, padding included."""

    @classmethod
    def of(cls, layout: BlockLayout, precision: str) -> PackedLayout:
        """Biases (one dimension), integers and what no group divides stay as they are.

        Raises:
            ExpertcastError: unknown precision, or one that would not make these experts smaller.
        """
        if precision not in _BITS:
            raise ExpertcastError(f"unknown precision {precision!r}: choose from {', '.join(PRECISIONS)}")
        bits = _BITS[precision]
        quantised = tuple(field for field in layout.fields if _can_quantise(field))
        group = next((g for g in _GROUPS if all(math.prod(field.shape) % g == 0 for field in quantised)), _GROUPS[-1])
        rows = sum(math.prod(field.shape) for field in quantised) // group
        offset = _aligned(rows * row_bytes(bits, group))
        kept = []
        for field in layout.fields:
            if field not in quantised:
                kept.append((field, offset))
                offset = _aligned(offset + field.nbytes)
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
        """Bytes of all rows: what is kept as it is comes after them."""
        return self.rows * row_bytes(self.bits, self.group)

    def pack(self, views: Mapping[str, Tensor], blocks: Tensor) -> None:
        """Quantise experts.

        Args:
            views: each parameter [N, ...] by name, on the CPU.
            blocks: uint8 [N, block_bytes], written.
        """
        count = blocks.shape[0]
        weights = [views[field.name].reshape(count, -1, self.group).float() for field in self.quantised]
        rows = quantise(torch.cat(weights, dim=1).flatten(0, 1), self.bits)
        blocks[:, : self.rows_nbytes] = rows.view(count, -1)
        for field, offset in self.kept:
            raw = views[field.name].reshape(count, -1).contiguous().view(torch.uint8)
            blocks[:, offset : offset + field.nbytes] = raw

    def expand(self, packed: Tensor, block: Tensor) -> None:
        """Write the full block that a packed one stands for, on the device where both lie.

        Args:
            packed: uint8 [block_bytes]; may be the first bytes of `block`.
            block: uint8 [full.block_bytes], written.
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
    """All experts of a store in one lower precision, in host memory.

    Args:
        layout: how one expert lies in a packed block.
        layers: L
        experts: E
        lock: page-locks the memory, as far as it can.
    """

    def __init__(self, layout: PackedLayout, layers: int, experts: int, lock: PageLock | None = None) -> None:
        self.layout = layout
        self.block_bytes = layout.block_bytes
        self._experts = experts
        self._memory = HostMemory(layers * experts * layout.block_bytes, lock)
        self._blocks = self._memory.bytes.view(layers * experts, layout.block_bytes)
        """uint8 [L * E, block_bytes]"""

    @property
    def nbytes(self) -> int:
        """Bytes of all packed blocks."""
        return self._blocks.numel()

    @property
    def pinned(self) -> bool:
        """Whether the memory is page-locked."""
        return self._memory.pinned

    @property
    def address(self) -> int:
        """Of the first block; blocks lie one after another by key."""
        return self._blocks.data_ptr()

    def block(self, key: int) -> Tensor:
        """uint8 [block_bytes] of one expert."""
        return self._blocks[key]

    def fill(self, layer: int, views: Mapping[str, Tensor]) -> None:
        """Pack one layer from its parameters [E, ...] by name."""
        layout, first = self.layout, layer * self._experts
        size = max(1, _CHUNK // (layout.rows * layout.group))
        for start in range(0, self._experts, size):
            end = min(start + size, self._experts)
            layout.pack(
                {name: view[start:end] for name, view in views.items()}, self._blocks[first + start : first + end]
            )

    def release(self) -> None:
        """Free the memory with the last tensor that views it."""
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


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
