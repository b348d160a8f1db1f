"""vLLM's own kernels over slots in place of experts.

T tokens, D hidden size, E routed experts per layer, K experts per token, S slots, P token-expert pairs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import override_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from expertcast_vllm.method import OffloadedMethod


class VllmKernel(ABC):
    """What an engine calls when a layer's experts have come.

    Args:
        views: slots as parameters [S, ...] by name.
    """

    def __init__(self, views: Mapping[str, Tensor]) -> None:
        self._weights = views["w13_weight"], views["w2_weight"]
        self.tokens = 0
        """Of the whole step, whose groups may be run one by one."""
        self.ids_dtype = torch.int32
        """Of the ids that vLLM gives its kernel."""

    @abstractmethod
    def run(
        self, experts: nn.Module, hidden_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor, ids_TK: Tensor,
        slots: Sequence[int] | None = None,
    ) -> Tensor:  # fmt: skip
        """The experts' weighted output [T, D]; bits are those of vLLM's kernel over all experts.

        Args:
            experts: whose layer it is.
            hidden_TD, weights_TK: what vLLM gives the kernel.
            slots_TK: where the experts lie that it names.
            ids_TK: these experts, as int64.
            slots: `slots_TK` on the host, as far as it is known there.
        """

    def run_pairs(self, experts: nn.Module, hidden_TD: Tensor, top_k: int, pairs: Tensor, slots: Tensor) -> Tensor:
        """Never called: a step that does not fit the slots is run in groups of tokens."""
        raise AssertionError("a token's experts are computed together")


class GatheringKernel(VllmKernel):
    """On the CPU, whose kernels go from one expert to the next by its size: slots, where both matrices of an expert lie
    side by side, are brought together for them."""

    def run(
        self, experts: nn.Module, hidden_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor, ids_TK: Tensor,
        slots: Sequence[int] | None = None,
    ) -> Tensor:  # fmt: skip
        used, places_TK = torch.unique(slots_TK, return_inverse=True)
        w13, w2 = (each[used] for each in self._weights)
        return _method(experts).run_slots(experts, hidden_TD, (w13, w2), places_TK.to(self.ids_dtype), weights_TK)


class MappingKernel(VllmKernel):
    """On CUDA, where Triton's kernel takes experts at any distance from each other, by a table of where they lie."""

    def run(
        self, experts: nn.Module, hidden_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor, ids_TK: Tensor,
        slots: Sequence[int] | None = None,
    ) -> Tensor:  # fmt: skip
        from vllm.model_executor.layers.fused_moe.fused_moe import try_get_optimal_moe_config  # has Triton's kernels

        method = _method(experts)
        count: Any = experts.global_num_experts
        table = torch.full((count + 1,), -1, dtype=torch.int32, device=ids_TK.device)
        # rows of padding ask for expert -1: the entry behind the last takes what is said of it
        table.scatter_(0, ids_TK.reshape(-1).long().remainder(count + 1), slots_TK.reshape(-1).int())
        given_TK = ids_TK.to(self.ids_dtype)
        w13, w2 = self._weights
        # the tiles of a resident layer and a whole step: others would sum in another order
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
