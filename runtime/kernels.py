"""transformers' own experts kernels over slots in place of experts.

T tokens, D hidden size, E routed experts per layer, K experts per token, S slots, P token-expert pairs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward

ExpertsForward = Callable[..., Tensor]

_KERNELS: dict[str, ExpertsForward] = {
    "grouped_mm": grouped_mm_experts_forward,
    "batched_mm": batched_mm_experts_forward,
}


_GROUPED_MM = tuple(
    function
    for function in (getattr(torch.nn.functional, "grouped_mm", None), getattr(torch, "_grouped_mm", None))
    if function is not None
)
"""What transformers calls, and what torch's wrapper of it calls."""


_MANY_GROUPS = 32
"""Empty groups cost about 1 us each on the CPU; telling them apart costs about as much as these."""


class SlotKernel:
    """Runs an experts module whose parameters are slot views [S, ...]."""

    def __init__(self, forward: ExpertsForward, slots: int) -> None:
        self._forward = forward
        self._slots = slots
        self._skip_empty = forward is grouped_mm_experts_forward and slots > _MANY_GROUPS

    def run(self, experts: nn.Module, hidden_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The experts' output [T, D] with slot ids in place of expert ids; the bits of the resident model."""
        own = experts.__dict__
        before = own["num_experts"]
        own["num_experts"] = self._slots
        try:
            if self._skip_empty and hidden_TD.device.type == "cpu":
                with _OccupiedGroups():
                    return self._forward(experts, hidden_TD, slots_TK, weights_TK)
            return self._forward(experts, hidden_TD, slots_TK, weights_TK)
        finally:
            own["num_experts"] = before

    def run_pairs(self, experts: nn.Module, hidden_PD: Tensor, slots_P: Tensor) -> Tensor:
        """Each pair's own expert output [P, D], not weighted: parts of a step that is done in chunks."""
        ones_P1 = hidden_PD.new_ones(hidden_PD.shape[0], 1)
        return self.run(experts, hidden_PD, slots_P.unsqueeze(-1), ones_P1)


def combine(output_PD: Tensor, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
    """Weighted sum over K as the kernels take it: the same products, the same reduction."""
    tokens, top_k = weights_TK.shape
    weighted_PD = output_PD * weights_TK.reshape(-1, 1)
    return weighted_PD.view(tokens, top_k, -1).sum(dim=1).to(dtype)


def kernel_name(model: PreTrainedModel) -> str:
    """Name of the kernel that the model's experts run with while offloaded: its own where slots can stand in."""
    name = next((value for value in model.get_experts_implementation().values() if value), "grouped_mm")
    return name if name in _KERNELS else "grouped_mm"


def kernel_of(model: PreTrainedModel) -> ExpertsForward:
    """That kernel; warns where it is not the one the model runs now."""
    now = next((value for value in model.get_experts_implementation().values() if value), "grouped_mm")
    name = kernel_name(model)
    if now != name:
        warnings.warn(
            f"experts implementation {now!r} cannot read slots: the offloaded model uses {name!r}", stacklevel=3
        )
    return _KERNELS[name]


class _OccupiedGroups(TorchFunctionMode):
    """On the CPU, `grouped_mm` walks through all S groups and pays for empty ones too; this skips them.

    Each occupied group is the same `mm` on the same rows and weights, so the bits are the same (tested).
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in _GROUPED_MM:
            return func(*args, **(kwargs or {}))
        rows, weight = args[:2]
        offsets = args[2] if len(args) > 2 else (kwargs or {})["offs"]
        output = rows.new_empty(rows.shape[0], weight.shape[-1])
        start = 0
        ends = offsets.tolist()
        for group, end in enumerate(ends):
            if end > start:
                torch.mm(rows[start:end], weight[group], out=output[start:end])
                start = end
        return output
