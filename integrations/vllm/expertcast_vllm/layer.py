"""What stands in the place of vLLM's layer of routed experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.moe_output import UnfinalizedMoEOutput
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExperts

from expertcast_vllm.method import OffloadedMethod
from expertcast_vllm.offload import WorkerOffload
from expertcast_vllm.settings import Settings


class OffloadedExperts(RoutedExperts):
    """Experts in a store, run from slots; vLLM's own class where nobody asked for that."""

    offload: WorkerOffload
    index: int
    """Among the MoE layers of this process, first to last."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        config = get_current_vllm_config()
        settings = Settings.of(config.additional_config)
        if settings is None:
            self.__class__ = RoutedExperts  # type: ignore[assignment]
            RoutedExperts.__init__(self, *args, **kwargs)
            return
        offload = WorkerOffload.of(config, settings)
        super().__init__(*args, **kwargs)
        self.offload = offload
        self.index = offload.add(self)

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> FusedMoEMethodBase:
        return OffloadedMethod.in_place_of(super()._get_quant_method(prefix, quant_config, moe_config), prefix)

    def forward_modular(
        self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, shared_experts: SharedExperts | None = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor | UnfinalizedMoEOutput:  # fmt: skip
        del shared_experts, shared_experts_input  # run by vLLM's runner, before or beside: no kernel here overlaps them
        return torch.ops.vllm.expertcast_run(x, topk_weights, topk_ids, self.index)
