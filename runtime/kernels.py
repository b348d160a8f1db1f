"""transformers' own experts kernels over slots in place of experts.

T tokens, D hidden size, E routed experts per layer, K experts per token, S slots, P token-expert pairs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import groupby
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
        self._grouped = forward is grouped_mm_experts_forward

    def run(
        self, experts: nn.Module, hidden_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor, ids_TK: Tensor
    ) -> Tensor:
        """The experts' output [T, D] with slot ids in place of expert ids; the bits of the resident model.

        Args:
            ids_TK: the experts that lie in these slots: they, not the slots, say in which order rows are computed.
        """
        return self._run(experts, hidden_TD, slots_TK, weights_TK, lambda: row_order(ids_TK))

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
    ) -> Tensor:
        own = experts.__dict__
        before = own["num_experts"]
        own["num_experts"] = self._slots
        try:
            if self._grouped and hidden_TD.device.type == "cpu" and (len(hidden_TD) > 1 or self._slots > _MANY_GROUPS):
                with _ExpertOrder(slots_TK.reshape(-1), order()):
                    return self._forward(experts, hidden_TD, slots_TK, weights_TK)
            return self._forward(experts, hidden_TD, slots_TK, weights_TK)
        finally:
            own["num_experts"] = before


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
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.sort and args[0].shape == self._order_P.shape:
            sorted_P = self._slots_P[self._order_P]
            self._groups = [(slot, len(list(rows))) for slot, rows in groupby(sorted_P.tolist())]
            return torch.return_types.sort((sorted_P, self._order_P))
        if func not in _GROUPED_MM:
            return func(*args, **(kwargs or {}))
        rows, weight = args[:2]
        output = rows.new_empty(rows.shape[0], weight.shape[-1])
        start = 0
        for slot, count in self._groups:
            torch.mm(rows[start : start + count], weight[slot], out=output[start : start + count])
            start += count
        return output
