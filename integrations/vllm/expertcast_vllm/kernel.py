"""vLLM's own kernels over slots in place of experts.

T tokens, D hidden size, K experts per token, S slots, P token-expert pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from expertcast_vllm.method import OffloadedMethod


class VllmKernel:
    """What an engine calls when a layer's experts have come.

    Args:
        views: slots as parameters [S, ...] by name.
    """

    def __init__(self, views: Mapping[str, Tensor]) -> None:
        self._weights = views["w13_weight"], views["w2_weight"]
        self._in_place = views["w13_weight"].device.type != "cpu"
        """Kernels on the CPU go from one expert to the next by its size: slots, where both matrices of an expert lie
        side by side, are brought together for them."""

    def run(
        self, experts: nn.Module, hidden_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor, ids_TK: Tensor,
        slots: Sequence[int] | None = None,
    ) -> Tensor:  # fmt: skip
        """The experts' weighted output [T, D]; bits are those of vLLM's kernel over all experts.

        Args:
            experts: whose layer it is.
            hidden_TD, weights_TK: what vLLM gives the kernel.
            slots_TK: where the experts lie that it names.
            ids_TK: these experts.
            slots: `slots_TK` on the host, as far as it is known there.
        """
        assert isinstance(experts, RoutedExperts)
        assert isinstance(experts.quant_method, OffloadedMethod)
        weights = self._weights
        if not self._in_place:
            used, slots_TK = torch.unique(slots_TK, return_inverse=True)
            weights = weights[0][used], weights[1][used]
        return experts.quant_method.run_slots(experts, hidden_TD, weights, slots_TK.to(ids_TK.dtype), weights_TK)

    def run_pairs(self, experts: nn.Module, hidden_TD: Tensor, top_k: int, pairs: Tensor, slots: Tensor) -> Tensor:
        """Never called: a step that does not fit the slots is run in groups of tokens."""
        raise AssertionError("a token's experts are computed together")

    def combine(self, output_PD: Tensor, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
        """As :meth:`run_pairs`."""
        raise AssertionError("a token's experts are computed together")
