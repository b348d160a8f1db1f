"""transformers' own experts kernels over slots in place of experts.

T tokens, D hidden size, E routed experts per layer, K experts per token, S slots, P token-expert pairs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward

from expertcast.runtime.engine.grouped import over_slots

ExpertsForward = Callable[..., Tensor]

_KERNELS: dict[str, ExpertsForward] = {
    "grouped_mm": grouped_mm_experts_forward, "batched_mm": batched_mm_experts_forward
}  # fmt: skip


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

    def run_pairs(self, experts: nn.Module, hidden_TD: Tensor, top_k: int, pairs: Tensor, slots: Tensor) -> Tensor:
        """Some pairs' own expert output [pairs, D], not weighted: a part of a step that is done in chunks.

        Args:
            experts, hidden_TD, top_k: of the whole step, whose P = T x K pairs are numbered token by token.
            pairs: which of them, in :func:`row_order`.
            slots: where the pairs' experts lie.
        """
        if self._grouped:
            rows, of_rows = hidden_TD[pairs // top_k], slots
        else:
            # cuBLAS chooses its kernel by the number of pairs too: all of the step's, in their places, those of other
            # chunks with one of these slots. A copy of an expert per pair: the resident model takes the same memory
            rows = hidden_TD.repeat_interleave(top_k, dim=0)
            of_rows = slots[:1].expand(len(rows)).index_put((pairs,), slots)
        ones = rows.new_ones(len(rows), 1)
        output = self._run(experts, rows, of_rows.unsqueeze(-1), ones, lambda: torch.arange(len(rows)))
        return output if self._grouped else output[pairs]

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
            between: AbstractContextManager[object] = nullcontext()
            if self._grouped:
                between = over_slots(experts, self._slots, slots_TK, order, slots)
            with between:
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
