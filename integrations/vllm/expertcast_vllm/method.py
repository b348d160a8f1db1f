"""Weights and kernels of offloaded experts: loaded to host memory, run from slots, never all on the device.

E experts of a layer on this worker, S slots, T tokens, D hidden size, K experts per token, P token-expert pairs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import override_config
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.storage.layout import BlockLayout
from expertcast.runtime.storage.memory import HostMemory, PageLock

_BACKENDS = (UnquantizedMoeBackend.CPU, UnquantizedMoeBackend.TRITON)
"""Backends whose kernels read experts from non-contiguous memory, or accept contiguous copies."""
_AT_ONCE = 8
"""Experts converted to the kernel's form at a time."""


class OffloadedMethod(UnquantizedFusedMoEMethod):
    """vLLM's method for unquantised experts, over host memory while they load and over slots afterwards."""

    requires_device_loading = False
    """True would copy all experts of a layer to the device."""

    memory: HostMemory | None = None
    """The layer's blocks until the store takes them."""
    layout: BlockLayout
    """Layout of a block in `memory`."""
    lock: PageLock | None = None
    is_prepared = False

    @classmethod
    def in_place_of(cls, method: FusedMoEMethodBase, prefix: str, lock: PageLock | None) -> OffloadedMethod:
        """Replace vLLM's method by an offloaded one.

        Args:
            method: vLLM's method.
            prefix: name of the layer.
            lock: page lock for the host memory; None for pageable memory.

        Raises:
            ExpertcastError: the experts are quantised, or the kernel cannot read slots.
        """
        if type(method) is not UnquantizedFusedMoEMethod:
            raise ExpertcastError(
                f"{prefix}: {type(method).__name__} has quantised experts, which are not offloaded under vLLM: use a "
                "bf16, fp16 or fp32 checkpoint, or switch expertcast off"
            )
        if method.unquantized_backend not in _BACKENDS:
            raise ExpertcastError(
                f"{prefix}: kernels of backend {method.unquantized_backend.value} cannot read slots: start vLLM with "
                "--moe-backend triton"
            )
        made = cls(method.moe)
        made.lock = lock
        return made

    def create_weights(self, layer: RoutedExperts, num_experts: int, *args: Any, **kwargs: Any) -> None:
        with torch.device("meta"):
            super().create_weights(layer, num_experts, *args, **kwargs)
        self.layout = BlockLayout.of_tensors({name: each[0] for name, each in layer.named_parameters(recurse=False)})
        self.memory = HostMemory(num_experts * self.layout.block_bytes, self.lock)
        _replace(layer, self.layout.views(self.memory.bytes))

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Convert the experts unless that was done while the model loaded."""
        if not self.is_prepared:
            self.prepare(layer)

    def prepare(self, layer: RoutedExperts) -> None:
        """Convert the experts to the kernel's form, a few at a time, and pass them to the store."""
        memory, device = self.memory, self.moe.device
        assert memory is not None
        self.is_prepared = True
        loaded = self.layout.views(memory.bytes)
        count = layer.local_num_experts
        with torch.inference_mode(False), torch.no_grad():
            for start in range(0, count, _AT_ONCE):
                rows = slice(start, min(start + _AT_ONCE, count))
                _replace(layer, {name: view[rows].to(device).contiguous() for name, view in loaded.items()})
                self.moe_kernel = None
                super().process_weights_after_loading(layer)
                ready = {name: each.data for name, each in layer.named_parameters(recurse=False)}
                if start == 0:
                    layout = BlockLayout.of_tensors({name: each[0] for name, each in ready.items()})
                    kept = memory if layout == self.layout else HostMemory(count * layout.block_bytes, self.lock)
                    views = layout.views(kept.bytes)
                for name, view in views.items():
                    view[rows].copy_(ready[name])
        if kept is not memory:
            memory.release()
        self.memory, self.layout = kept, layout
        _replace(layer, {name: each[:0] for name, each in ready.items()})
        layer.offload.prepared(layer)

    def use_slots(self, layer: RoutedExperts, views: Mapping[str, Tensor]) -> None:
        """Replace the layer's parameters by slots, [S, ...] each by name."""
        _replace(layer, views)
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)  # it references the biases
        assert self.moe_kernel is not None
        self.moe_kernel.fused_experts.quant_config = self.moe_quant_config

    def run_slots(
        self, layer: RoutedExperts, hidden_TD: Tensor, weights: tuple[Tensor, Tensor], slots_TK: Tensor,
        weights_TK: Tensor, table_E: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Run vLLM's kernel over the weights of some slots.

        Args:
            layer: the layer.
            hidden_TD: [T, D] inputs.
            weights: w13 and w2, [S, ...] each.
            slots_TK: slot of each expert; expert ids if `table_E` is set.
            weights_TK: combine weights.
            table_E: slot of each expert, or None.

        Returns:
            [T, D] outputs.
        """
        w13, w2 = weights
        assert self.moe_kernel is not None
        return self.moe_kernel.apply(
            hidden_states=hidden_TD, w1=w13, w2=w2, topk_weights=weights_TK, topk_ids=slots_TK,
            activation=layer.activation, apply_router_weight_on_input=layer.apply_router_weight_on_input,
            global_num_experts=len(w13) if table_E is None else len(table_E), expert_map=table_E,
        )  # fmt: skip


def _replace(layer: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Replace a layer's parameters by other tensors, and keep the attributes that vLLM set on them."""
    for name, tensor in tensors.items():
        before = layer._parameters[name]
        parameter = nn.Parameter(tensor, requires_grad=False)
        parameter.__dict__.update(before.__dict__)
        layer._parameters[name] = parameter


# Kernels


class VllmKernel(ABC):
    """Kernel that the engine calls once a layer's experts are in slots.

    Args:
        views: the slots as parameters [S, ...] by name.
    """

    def __init__(self, views: Mapping[str, Tensor]) -> None:
        self._weights = views["w13_weight"], views["w2_weight"]
        self.tokens = 0
        """Tokens of the whole step, which may run in groups."""
        self.ids_dtype = torch.int32
        """Dtype of vLLM's expert ids."""

    @abstractmethod
    def run(
        self, experts: nn.Module, hidden_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor, ids_TK: Tensor,
        slots: Sequence[int] | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the experts' weighted output [T, D], bit for bit that of vLLM's kernel over all experts.

        Args:
            experts: the layer.
            hidden_TD: inputs of vLLM's kernel.
            slots_TK: slot of each expert in `ids_TK`.
            weights_TK: combine weights of vLLM's kernel.
            ids_TK: expert ids, int64.
            slots: `slots_TK` on the host, if known there.
        """

    def run_pairs(self, experts: nn.Module, hidden_TD: Tensor, top_k: int, pairs: Tensor, slots: Tensor) -> Tensor:
        """Never called: a step that does not fit the slots runs in groups of tokens."""
        raise AssertionError("a token's experts run together")


class GatheringKernel(VllmKernel):
    """Kernel for the CPU. It copies the used experts together, because vLLM's CPU kernels read contiguous experts while
    a slot has both matrices of one expert.
    """

    def run(
        self, experts: nn.Module, hidden_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor, ids_TK: Tensor,
        slots: Sequence[int] | None = None,
    ) -> Tensor:  # fmt: skip
        used, places_TK = torch.unique(slots_TK, return_inverse=True)
        w13, w2 = (each[used] for each in self._weights)
        return _method(experts).run_slots(experts, hidden_TD, (w13, w2), places_TK.to(self.ids_dtype), weights_TK)


class MappingKernel(VllmKernel):
    """Kernel for CUDA. vLLM's Triton kernel reads experts from slots by a table of their locations."""

    def run(
        self, experts: nn.Module, hidden_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor, ids_TK: Tensor,
        slots: Sequence[int] | None = None,
    ) -> Tensor:  # fmt: skip
        from vllm.model_executor.layers.fused_moe.fused_moe import try_get_optimal_moe_config  # imports Triton

        method = _method(experts)
        count: Any = experts.global_num_experts
        table = torch.full((count + 1,), -1, dtype=torch.int32, device=ids_TK.device)
        # Padding rows have expert -1; the extra last entry takes their writes.
        table.scatter_(0, ids_TK.reshape(-1).long().remainder(count + 1), slots_TK.reshape(-1).int())
        given_TK = ids_TK.to(self.ids_dtype)
        w13, w2 = self._weights
        # Use the tiles of a resident layer and a whole step: others would sum in another order.
        config = try_get_optimal_moe_config(
            (count, *w13.shape[1:]), (count, *w2.shape[1:]), ids_TK.shape[1],
            method.moe_quant_config.config_name(hidden_TD.dtype), self.tokens or len(hidden_TD),
        )  # fmt: skip
        with override_config(config):
            return method.run_slots(experts, hidden_TD, self._weights, given_TK, weights_TK, table[:count])


def _method(experts: nn.Module) -> OffloadedMethod:
    assert isinstance(experts, RoutedExperts)
    assert isinstance(experts.quant_method, OffloadedMethod)
    return experts.quant_method
