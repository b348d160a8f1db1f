"""transformers' own experts kernels over slots in place of experts.

T tokens, D hidden size, E routed experts per layer, K experts per token, S slots, P token-expert pairs.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward

from expertcast.predictors.plain import Json

ExpertsForward = Callable[..., Tensor]

_KERNELS: dict[str, ExpertsForward] = {
    "grouped_mm": grouped_mm_experts_forward, "batched_mm": batched_mm_experts_forward
}  # fmt: skip

_GROUPED_MM = tuple(
    function
    for function in (getattr(torch.nn.functional, "grouped_mm", None), getattr(torch, "_grouped_mm", None))
    if function is not None
)
"""What transformers calls, and what torch's wrapper of it calls."""

_MANY_GROUPS = 32
"""Empty groups cost about 1 us each on the CPU; telling them apart costs about as much as these."""

_MOST_GROUPS = 1023
"""torch's CUDA kernel of `grouped_mm` takes no more."""


class SlotKernel:
    """Runs an experts module whose parameters are slot views [S, ...]."""

    def __init__(self, forward: ExpertsForward, slots: int) -> None:
        self._forward = forward
        self._slots = slots
        self._grouped = forward is grouped_mm_experts_forward

    def run(
        self,
        experts: nn.Module,
        hidden_TD: Tensor,
        slots_TK: Tensor,
        weights_TK: Tensor,
        ids_TK: Tensor,
        slots: Sequence[int] | None = None,
    ) -> Tensor:
        """The experts' output [T, D] with slot ids in place of expert ids; the bits of the resident model.

        Args:
            experts, hidden_TD, slots_TK, weights_TK: what transformers' kernel takes, with slots in place of experts.
            ids_TK: the experts that lie in these slots: they, not the slots, say in which order rows are computed.
            slots: `slots_TK` (flat) on the host, if it is known there: spares a CUDA device from being asked.
        """
        return self._run(experts, hidden_TD, slots_TK, weights_TK, lambda: row_order(ids_TK), slots)

    def run_pairs(self, experts: nn.Module, hidden_PD: Tensor, slots_P: Tensor) -> Tensor:
        """Each pair's own expert output [P, D], not weighted: parts of a step that is done in chunks.

        Pairs come in :func:`row_order`, restricted to the chunk.
        """
        ones_P1 = hidden_PD.new_ones(hidden_PD.shape[0], 1)
        return self._run(experts, hidden_PD, slots_P.unsqueeze(-1), ones_P1, lambda: torch.arange(len(slots_P)))

    def _run(
        self,
        experts: nn.Module,
        hidden_TD: Tensor,
        slots_TK: Tensor,
        weights_TK: Tensor,
        order: Callable[[], Tensor],
        slots: Sequence[int] | None = None,
    ) -> Tensor:
        own = experts.__dict__
        before = own["num_experts"]
        own["num_experts"] = self._slots
        try:
            with self._groups(experts, slots_TK, order, slots):
                return self._forward(experts, hidden_TD, slots_TK, weights_TK)
        finally:
            own["num_experts"] = before

    def _groups(
        self, experts: nn.Module, slots_TK: Tensor, order: Callable[[], Tensor], slots: Sequence[int] | None
    ) -> AbstractContextManager[object]:
        """What stands between the kernel and `grouped_mm` over so many slots on such a device; often nothing."""
        if not self._grouped:
            return nullcontext()
        if slots_TK.device.type == "cpu":
            if len(slots_TK) > 1 or self._slots > _MANY_GROUPS:
                return _ExpertOrder(slots_TK.reshape(-1), order())
            return nullcontext()
        native = _is_native(next(experts.parameters(recurse=False)))
        if slots_TK.device.type != "cuda" or (native and self._slots <= _MOST_GROUPS):
            return nullcontext()
        return _SlotRanges(slots_TK.reshape(-1).tolist() if slots is None else slots, native)


def row_order(ids_TK: Tensor) -> Tensor:
    """Order [P] in which the kernels compute token-expert pairs: by expert, ties as torch's sort leaves them."""
    return torch.sort(ids_TK.reshape(-1)).indices


def combine(output_PD: Tensor, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
    """Weighted sum over K as the kernels take it: the same products, the same reduction."""
    tokens, top_k = weights_TK.shape
    weighted_PD = output_PD * weights_TK.reshape(-1, 1)
    return weighted_PD.view(tokens, top_k, -1).sum(dim=1).to(dtype)


def kernel_name(model: PreTrainedModel) -> str:
    """Name of the kernel that the model's experts run with while offloaded: its own where slots can stand in."""
    now = _own_kernel(model)
    return now if now in _KERNELS else "grouped_mm"


def kernel_of(model: PreTrainedModel) -> ExpertsForward:
    """That kernel; warns where it is not the one the model runs now."""
    now, name = _own_kernel(model), kernel_name(model)
    if now != name:
        warnings.warn(
            f"experts implementation {now!r} cannot read slots: the offloaded model uses {name!r}", stacklevel=3
        )
    return _KERNELS[name]


def _own_kernel(model: PreTrainedModel) -> str:
    return next((value for value in model.get_experts_implementation().values() if value), "grouped_mm")


class _ExpertOrder(TorchFunctionMode):
    """On the CPU, makes `grouped_mm` over slots the very products that it makes over experts.

    Rows are sorted by expert, as in the resident model: torch's CPU sort need not be stable, and where several
    tokens share an expert its `mm` may round a row otherwise at another place in the group. Empty groups, which
    cost time on the CPU, are skipped.
    """

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
        return _products(rows, weight, self._groups)


class _SlotRanges(TorchFunctionMode):
    """On CUDA, `grouped_mm` over more groups than its kernel takes, or on a device that has no kernel of it.

    There torch asks the device for the groups and multiplies slot by slot, empty ones too; the host knows which are
    not. Rows are sorted by slot.
    """

    def __init__(self, slots: Sequence[int], native: bool) -> None:
        super().__init__()
        self._native = native
        self._groups = sorted(Counter(slots).items())

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Json | None = None
    ) -> object:
        if func not in _GROUPED_MM:
            return func(*args, **(kwargs or {}))
        rows, weight = args[:2]
        if not self._native:
            return _products(rows, weight, self._groups)
        offsets = args[2] if len(args) > 2 else (kwargs or {})["offs"]
        parts, start = [], 0
        for index, groups in groupby(self._groups, key=lambda group: group[0] // _MOST_GROUPS):
            end = start + sum(count for _, count in groups)
            within = slice(index * _MOST_GROUPS, (index + 1) * _MOST_GROUPS)
            parts.append(func(rows[start:end], weight[within], offs=offsets[within] - start))
            start = end
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _products(rows: Tensor, weight: Tensor, groups: Sequence[tuple[int, int]]) -> Tensor:
    """One product per group (slot, rows), the groups' rows one after another."""
    output = rows.new_empty(rows.shape[0], weight.shape[-1])
    start = 0
    for slot, count in groups:
        torch.mm(rows[start : start + count], weight[slot], out=output[start : start + count])
        start += count
    return output


def _is_native(weight: Tensor) -> bool:
    """Whether torch has a kernel of `grouped_mm` for this device and dtype."""
    return weight.dtype == torch.bfloat16 and torch.cuda.get_device_capability(weight.device)[0] in (9, 10)
