"""What stands in the place of vLLM's layer of routed experts."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.moe_output import UnfinalizedMoEOutput
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExperts

from expertcast.predictors.messages import ExpertcastError
from expertcast_vllm.method import OffloadedMethod
from expertcast_vllm.offload import WorkerOffload
from expertcast_vllm.operators import RUN
from expertcast_vllm.refusing import check_shape
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
        # vLLM's own asks for the method, which asks for this
        object.__setattr__(self, "offload", WorkerOffload.of(config, settings))
        super().__init__(*args, **kwargs)
        self.index = self.offload.add(self)
        if self.index == 0:
            check_shape(self.offload)
        self._come: set[tuple[str, bool, int]] = set()
        shards = (3 if self.moe_config.is_act_and_mul else 2) * (2 if self.moe_config.has_bias else 1)
        self._expected = shards * self.local_num_experts

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> FusedMoEMethodBase:
        method = super()._get_quant_method(prefix, quant_config, moe_config)
        return OffloadedMethod.in_place_of(method, prefix, self.offload.lock)

    def weight_loader(  # type: ignore[override]
        self, param: nn.Parameter, loaded_weight: Tensor, weight_name: str, shard_id: str, expert_id: int,
        return_success: bool = False,
    ) -> bool | None:  # fmt: skip
        """As vLLM's. With the experts on disk, a layer that is complete goes there: the rest needs its memory.

        Raises:
            ExpertcastError: the layer's weights were loaded before.
        """
        if self.quant_method.is_prepared:
            raise ExpertcastError(
                f"{self.layer_name}: the experts lie in a store and cannot be loaded again: start vLLM anew"
            )
        loaded = super().weight_loader(param, loaded_weight, weight_name, shard_id, expert_id, return_success=True)
        if loaded and self.offload.settings.offload.store == "disk":
            self._come.add((shard_id, "bias" in weight_name, expert_id))
            if len(self._come) == self._expected:
                self.quant_method.prepare(self)
        return loaded if return_success else None

    def forward_modular(
        self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, shared_experts: SharedExperts | None = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor | UnfinalizedMoEOutput:  # fmt: skip
        del shared_experts, shared_experts_input  # run by vLLM's runner, before or beside: no kernel here overlaps them
        return RUN(x, topk_weights, topk_ids, self.index)


OffloadedExperts.weight_loader.supports_moe_loading = True  # type: ignore[attr-defined]
