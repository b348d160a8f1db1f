"""torch's `grouped_mm` over slots in place of experts: the resident model's bits, and no value asked for.

D size of a row, F size of a result's row, S slots, P token-expert pairs.

How many groups there are changes no bits on CUDA. torch takes the larger of two tiles where P // groups > 128 and
F > 128 (aten/src/ATen/native/cuda/GroupMM.cu): S groups of a long prefill may get another one than E groups. But either
makes each result in one fp32 accumulator, 16 products an instruction, in ascending order and without a split of D
(cutlass, sm90_mma_array_tma_gmma_ss_warpspecialized.hpp and sm100_mma_array_warpspecialized.hpp). What the hardware
does within an instruction is not documented: the GPU test of this module asks it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from expertcast.predictors.plain import Json
from expertcast.runtime.engine.grouped_host import products
from expertcast.runtime.links.carve_out import has_persistent_grouped_mm

_GROUPED_MM = tuple(
    function
    for function in (getattr(torch.nn.functional, "grouped_mm", None), getattr(torch, "_grouped_mm", None))
    if function is not None
)
"""What transformers calls, and what torch's wrapper of it calls."""

MANY_GROUPS = 32
"""Empty groups cost about 1 us each on the CPU; telling them apart costs about as much as these."""

_MOST_GROUPS = 1023
"""torch's CUDA kernel takes no more: aten/src/ATen/native/cuda/GroupMM.cu."""


def over_slots(
    experts: nn.Module, count: int, slots_TK: Tensor, order: Callable[[], Tensor], slots: Sequence[int] | None
) -> AbstractContextManager[object]:
    """What must stand between the experts' kernel and `grouped_mm` over so many slots on such a device; often nothing.

    On the CPU :class:`expertcast.runtime.engine.grouped_host.HostGrouped` does the same faster.

    Args:
        experts: the module, whose parameters are slot views [S, ...].
        count: S.
        slots_TK: the slots that are computed.
        order: gives the order [P] in which pairs are computed.
        slots: `slots_TK` (flat) on the host, if it is known there.
    """
    if slots_TK.device.type == "cpu":
        if len(slots_TK) > 1 or count > MANY_GROUPS:
            return _ExpertOrder(slots_TK.reshape(-1), order())
        return nullcontext()
    if slots_TK.device.type != "cuda":
        return nullcontext()
    if not has_persistent_grouped_mm(next(experts.parameters(recurse=False))):
        return _SlotProducts(slots_TK.reshape(-1).tolist() if slots is None else slots)
    return nullcontext() if count <= _MOST_GROUPS else _SlotRanges(slots)


class _ExpertOrder(TorchFunctionMode):
    """On the CPU, makes `grouped_mm` over slots the very products that it makes over experts: the reference for
    `HostGrouped`, and what stands in for it where transformers' kernel is written otherwise."""

    def __init__(self, slots_P: Tensor, order_P: Tensor) -> None:
        super().__init__()
        self._slots_P = slots_P
        self._order_P = order_P
        self._groups: list[tuple[int, int]] = []
        """(slot, rows), in the order of the rows."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Json | None = None
    ) -> object:
        if func is torch.sort and args[0].shape == self._order_P.shape:
            sorted_P = self._slots_P[self._order_P]
            self._groups = [(slot, len(list(rows))) for slot, rows in groupby(sorted_P.tolist())]
            return torch.return_types.sort((sorted_P, self._order_P))
        if func not in _GROUPED_MM:
            return func(*args, **(kwargs or {}))
        rows, weight = args[:2]
        return products(rows, weight, self._groups)


class _SlotProducts(TorchFunctionMode):
    """`grouped_mm` on a CUDA device that has no kernel of it.

    There torch asks the device for the groups and multiplies slot by slot, empty ones too; the host knows which are
    not. Rows are sorted by slot.
    """

    def __init__(self, slots: Sequence[int]) -> None:
        super().__init__()
        self._groups = sorted(Counter(slots).items())

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Json | None = None
    ) -> object:
        if func not in _GROUPED_MM:
            return func(*args, **(kwargs or {}))
        rows, weight = args[:2]
        return products(rows, weight, self._groups)


class _SlotRanges(TorchFunctionMode):
    """On CUDA, `grouped_mm` over more groups than its kernel takes: range by range. Rows are sorted by slot."""

    def __init__(self, slots: Sequence[int] | None) -> None:
        super().__init__()
        self._rows_of: list[tuple[int, int]] | None = None
        """(range, its rows) of the ranges that have any, where the host knows."""
        if slots is not None:
            self._rows_of = sorted(Counter(slot // _MOST_GROUPS for slot in slots).items())

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Json | None = None
    ) -> object:
        if func not in _GROUPED_MM:
            return func(*args, **(kwargs or {}))
        rows_PD, weight = args[:2]
        ends_S = args[2] if len(args) > 2 else (kwargs or {})["offs"]
        if self._rows_of is None:
            return _ranges(func, rows_PD, weight, ends_S)
        parts, start = [], 0
        for index, count in self._rows_of:
            within = slice(index * _MOST_GROUPS, (index + 1) * _MOST_GROUPS)
            parts.append(func(rows_PD[start : start + count], weight[within], offs=ends_S[within] - start))
            start += count
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _ranges(multiply: Callable[..., Tensor], rows_PD: Tensor, weight: Tensor, ends_S: Tensor) -> Tensor:
    """[P, F] without a value on the host, so that it can be captured in a CUDA graph.

    A range after the first begins one group early: that group takes all rows before the range's own, and what it makes
    of them is dropped. Rows behind a range's last group are not computed.

    Args:
        multiply: torch's `grouped_mm`.
        rows_PD, weight: its factors, the weight [S, D, F].
        ends_S: where each slot's rows end.
    """
    row_P1 = torch.arange(len(rows_PD), device=rows_PD.device).unsqueeze(-1)
    output_PF = multiply(rows_PD, weight[:_MOST_GROUPS], offs=ends_S[:_MOST_GROUPS])
    for early in range(_MOST_GROUPS - 1, len(weight) - 1, _MOST_GROUPS - 1):
        within = slice(early, early + _MOST_GROUPS)
        part_PF = multiply(rows_PD, weight[within], offs=ends_S[within])
        output_PF = torch.where(row_P1 < ends_S[early], output_PF, part_PF)
    return output_PF
