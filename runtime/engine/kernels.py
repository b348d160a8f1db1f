"""transformers' own experts kernels over slots in place of experts.

T tokens, D hidden size, E routed experts per layer, K experts per token, S slots, P token-expert pairs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward

from expertcast.runtime.engine.grouped import MANY_GROUPS, over_slots
from expertcast.runtime.engine.grouped_host import HostGrouped
from expertcast.runtime.engine.rows import combine, row_order

ExpertsForward = Callable[..., Tensor]

_KERNELS: dict[str, ExpertsForward] = {
    "grouped_mm": grouped_mm_experts_forward, "batched_mm": batched_mm_experts_forward
}  # fmt: skip

_SWITCH = "_optimize_model_for_decode"
"""Method by which transformers' `generate` runs its decode steps with another kernel, on some devices."""


class SlotKernel:
    """Runs an experts module whose parameters are slot views [S, ...]."""

    def __init__(self, forward: ExpertsForward, slots: int) -> None:
        self.forward = forward
        """transformers' kernel that runs from now on."""
        self._slots = slots
        self._on_host = HostGrouped.of(grouped_mm_experts_forward)

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

    def combine(self, output_PD: Tensor, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
        """All pairs' outputs of :meth:`run_pairs`, weighted and summed."""
        return combine(output_PD, weights_TK, dtype)

    def by_expert(self, slots_TK: Tensor) -> bool:
        """Whether the grouped kernel computes these rows in the order of their experts; else in that of their slots."""
        return slots_TK.device.type == "cpu" and (len(slots_TK) > 1 or self._slots > MANY_GROUPS)

    @property
    def _grouped(self) -> bool:
        return self.forward is grouped_mm_experts_forward

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
                if self._on_host is not None and self.by_expert(slots_TK):
                    return self._on_host.run(experts, hidden_TD, slots_TK, weights_TK, order())
                between = over_slots(experts, self._slots, slots_TK, order, slots)
            with between:
                return self.forward(experts, hidden_TD, slots_TK, weights_TK)
        finally:
            own["num_experts"] = before


def kernel_name(model: PreTrainedModel) -> str:
    """Name of the kernel that the model's experts run with while offloaded: its own where slots can stand in."""
    return _in_slots(_own_kernel(model))


def kernel_of(model: PreTrainedModel) -> ExpertsForward:
    """That kernel; warns where it is not the one the model runs now."""
    now, name = _own_kernel(model), kernel_name(model)
    if now != name:
        warnings.warn(
            f"experts implementation {now!r} cannot read slots: the offloaded model uses {name!r}", stacklevel=3
        )
    return _KERNELS[name]


def _own_kernel(model: PreTrainedModel) -> str:
    return model.get_experts_implementation()[_part(model)] or "grouped_mm"


def _part(model: PreTrainedModel) -> str:
    """Which entry of the model's experts implementations its experts go by: "", or the name of a sub-config."""
    of_experts = next((module.config for module in model.modules() if hasattr(module, "_is_expert_parallel")), None)
    parts = (name for name in model.config.sub_configs if getattr(model.config, name, None) is of_experts)
    return next(parts, "") if of_experts is not None else ""


def _in_slots(name: str) -> str:
    return name if name in _KERNELS else "grouped_mm"


@contextmanager
def decode_kernel_followed(model: PreTrainedModel, kernel: SlotKernel) -> Iterator[None]:
    """`generate` switches the slots' kernel wherever it would switch the resident model's.

    To be entered before the model is given our experts function, whose name tells transformers nothing.
    """
    original = getattr(type(model), _SWITCH, None)
    if original is None:  # no model that generates
        yield
        return
    resident = _Resident(model, kernel)
    model.__dict__[_SWITCH] = lambda: original(resident)
    try:
        yield
    finally:
        model.__dict__.pop(_SWITCH, None)


class _Resident:
    """The model as transformers would find it if it were not offloaded."""

    def __init__(self, model: PreTrainedModel, kernel: SlotKernel) -> None:
        self._model, self._kernel = model, kernel
        self._part = _part(model)
        self._implementations: dict[str, str | None] = model.get_experts_implementation()

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def get_experts_implementation(self) -> dict[str, str | None]:
        return dict(self._implementations)

    def set_experts_implementation(self, implementation: str | Mapping[str, str | None]) -> None:
        if isinstance(implementation, str):
            implementation = dict.fromkeys(self._implementations, implementation)
        self._implementations.update(implementation)
        self._kernel.forward = _KERNELS[_in_slots(self._implementations[self._part] or "grouped_mm")]
