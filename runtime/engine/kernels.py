"""transformers' own experts kernels over slots in place of experts.

T tokens, D hidden size, E routed experts per layer, K experts per token, S slots, P token-expert pairs.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward

from expertcast.data.packed_experts import is_packed, products, run_experts
from expertcast.predictors.view import Functions
from expertcast.runtime.engine.engine import row_order

# torch's `grouped_mm` over slots in place of experts: the resident model's bits, without reading values.
#
# D size of a row, F size of a result's row, S slots, P token-expert pairs.
#
# The number of groups changes no bits on CUDA. torch takes the larger of two tiles where P // groups > 128 and F >
# 128 (aten/src/ATen/native/cuda/GroupMM.cu): S groups of a long prefill may get another one than E groups. But either
# makes each result in one fp32 accumulator, 16 products an instruction, in ascending order and without a split of D
# (cutlass, sm90_mma_array_tma_gmma_ss_warpspecialized.hpp and sm100_mma_array_warpspecialized.hpp). What the hardware
# does within an instruction is not documented: the GPU test of this module checks it.

_GROUPED_MM = tuple(
    function
    for function in (getattr(torch.nn.functional, "grouped_mm", None), getattr(torch, "_grouped_mm", None))
    if function is not None
)
"""The function that transformers calls, and the one that torch's wrapper calls."""

_MOST_GROUPS = 1023
"""torch's CUDA kernel takes no more: aten/src/ATen/native/cuda/GroupMM.cu."""


def over_slots(
    experts: nn.Module, count: int, slots_TK: Tensor, slots: Sequence[int] | None
) -> AbstractContextManager[object]:
    """Context in which `grouped_mm` runs over this many slots of a CUDA device; does nothing where torch's own does.

    Args:
        experts: the module, whose parameters are slot views [S, ...].
        count: S.
        slots_TK: the slots that are computed.
        slots: `slots_TK` (flat) on the host, if it is known there.
    """
    if slots_TK.device.type != "cuda":
        return nullcontext()
    if not has_persistent_grouped_mm(next(experts.parameters(recurse=False))):
        return _SlotProducts(slots_TK.reshape(-1).tolist() if slots is None else slots)
    return nullcontext() if count <= _MOST_GROUPS else _SlotRanges()


def has_persistent_grouped_mm(weight: Tensor) -> bool:
    """Whether torch multiplies groups by this weight [S, ...] with its own CUDA kernel: bf16 on Hopper or Blackwell.

    Source: aten/src/ATen/native/cuda/GroupMM.cu; `_grouped_mm` takes other devices and types group by group.
    """
    if weight.device.type != "cuda" or weight.dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(weight.device)[0] in (9, 10)


class _InPlaceOfGroupedMM(Functions):
    """Runs :meth:`multiply` where torch's `grouped_mm` is called. Rows are sorted by slot."""

    def run(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> object:
        return self.multiply(func, *args, **kwargs) if func in _GROUPED_MM else func(*args, **kwargs)

    @abstractmethod
    def multiply(self, own: Callable[..., Tensor], rows_PD: Tensor, weight: Tensor, offs: Tensor, **_: Any) -> Tensor:
        """Return [P, F].

        Args:
            own: torch's `grouped_mm`.
            rows_PD, weight: its factors, the weight [S, D, F].
            offs: where each slot's rows end [S].
        """


class _SlotProducts(_InPlaceOfGroupedMM):
    """`grouped_mm` on a CUDA device that has no kernel of it.

    There torch asks the device for the groups and multiplies slot by slot, empty ones too; the host knows which are
    not.
    """

    def __init__(self, slots: Sequence[int]) -> None:
        super().__init__()
        self._groups = sorted(Counter(slots).items())

    def multiply(self, own: Callable[..., Tensor], rows_PD: Tensor, weight: Tensor, offs: Tensor, **_: Any) -> Tensor:
        return products(rows_PD, weight, self._groups)


class _SlotRanges(_InPlaceOfGroupedMM):
    """On CUDA, `grouped_mm` over more groups than its kernel takes: range by range."""

    def multiply(self, own: Callable[..., Tensor], rows_PD: Tensor, weight: Tensor, offs: Tensor, **_: Any) -> Tensor:
        """Return [P, F] without a value on the host, so that it can be captured in a CUDA graph.

        A range after the first begins one group early: that group takes all rows before the range's own, and what it
        makes of them is dropped. Rows behind a range's last group are not computed.
        """
        row_P1 = torch.arange(len(rows_PD), device=rows_PD.device).unsqueeze(-1)
        output_PF = own(rows_PD, weight[:_MOST_GROUPS], offs=offs[:_MOST_GROUPS])
        for early in range(_MOST_GROUPS - 1, len(weight) - 1, _MOST_GROUPS - 1):
            within = slice(early, early + _MOST_GROUPS)
            part_PF = own(rows_PD, weight[within], offs=offs[within])
            output_PF = torch.where(row_P1 < offs[early], output_PF, part_PF)
        return output_PF


ExpertsForward = Callable[..., Tensor]

_KERNELS: dict[str, ExpertsForward] = {
    "grouped_mm": grouped_mm_experts_forward, "batched_mm": batched_mm_experts_forward
}  # fmt: skip

_SWITCH = "_optimize_model_for_decode"
"""Method by which transformers' `generate` runs its decode steps with another kernel, on some devices."""


class SlotKernel:
    """Runs an experts module whose parameters are slot views [S, ...].

    Args:
        forward: transformers' kernel; packed experts have a function of their own.
    """

    def __init__(self, forward: ExpertsForward) -> None:
        self.forward = forward
        """transformers' kernel that runs from now on."""

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
        if self.by_expert(experts, slots_TK):
            return run_experts(experts, hidden_TD, slots_TK, weights_TK, partial(row_order, ids_TK), slots)
        own = experts.__dict__
        before = own["num_experts"]
        own["num_experts"] = count = len(own["_parameters"]["down_proj"])
        try:
            with over_slots(experts, count, slots_TK, slots) if self._grouped else nullcontext():
                return self.forward(experts, hidden_TD, slots_TK, weights_TK)
        finally:
            own["num_experts"] = before

    def run_pairs(self, experts: nn.Module, hidden_TD: Tensor, top_k: int, pairs: Tensor, slots: Tensor) -> Tensor:
        """Some pairs' own expert output [pairs, D], not weighted: a part of a step that is done in chunks.

        Args:
            experts, hidden_TD, top_k: of the whole step, whose P = T x K pairs are numbered token by token.
            pairs: which of them, in :func:`row_order`.
            slots: where the pairs' experts lie.
        """
        grouped = self._grouped or is_packed(experts)
        if grouped:
            rows, of_rows = hidden_TD[pairs // top_k], slots
        else:
            # cuBLAS chooses its kernel by the number of pairs too: all of the step's, in their places, those of other
            # chunks with one of these slots. A copy of an expert per pair: the resident model takes the same memory
            rows = hidden_TD.repeat_interleave(top_k, dim=0)
            of_rows = slots[:1].expand(len(rows)).index_put((pairs,), slots)
        ones = rows.new_ones(len(rows), 1)
        order = torch.arange(len(rows)) if grouped else of_rows  # the rows of groups are in order; others have none
        output = self.run(experts, rows, of_rows.unsqueeze(-1), ones, order)
        return output if grouped else output[pairs]

    def by_expert(self, experts: nn.Module, slots_TK: Tensor) -> bool:
        """Whether :func:`run_experts` computes these rows, in the order of their experts.

        On the CPU it does so in place of transformers' grouped kernel, with the same products. There torch's sort need
        not be stable, and where several tokens share an expert, `mm` may round a row differently at another place.
        """
        return is_packed(experts) or (self._grouped and slots_TK.device.type == "cpu")

    @property
    def _grouped(self) -> bool:
        return self.forward is grouped_mm_experts_forward


def kernel_name(model: PreTrainedModel) -> str:
    """Return the name of the offloaded experts' kernel: the model's own where it can read slots."""
    return _in_slots(_own_kernel(model.get_experts_implementation(), _part(model.modules(), model.config)))


def kernel_of(model: PreTrainedModel) -> ExpertsForward:
    """Return the kernel of :func:`kernel_name`; warn where the model runs another one now."""
    now = _own_kernel(model.get_experts_implementation(), _part(model.modules(), model.config))
    name = _in_slots(now)
    if now != name:
        warnings.warn(
            f"experts implementation {now!r} cannot read slots: the offloaded model uses {name!r}", stacklevel=3
        )
    return _KERNELS[name]


def _own_kernel(implementations: Mapping[str, str | None], part: str) -> str:
    return implementations[part] or "grouped_mm"


def _part(modules: Iterable[nn.Module], config: PreTrainedConfig) -> str:
    """Return the key of the experts' entry in a model's experts implementations: "", or the name of a sub-config."""
    of_experts = next((module.config for module in modules if hasattr(module, "_is_expert_parallel")), None)
    parts = (name for name in config.sub_configs if getattr(config, name, None) is of_experts)
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
        self._part = _part(model.modules(), model.config)
        self._implementations: dict[str, str | None] = model.get_experts_implementation()

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def get_experts_implementation(self) -> dict[str, str | None]:
        return dict(self._implementations)

    def set_experts_implementation(self, implementation: str | Mapping[str, str | None]) -> None:
        if isinstance(implementation, str):
            implementation = dict.fromkeys(self._implementations, implementation)
        self._implementations.update(implementation)
        self._kernel.forward = _KERNELS[_in_slots(_own_kernel(self._implementations, self._part))]
