"""The view of a vLLM model's MoE layers that predictors, traces and engines stand on.

T tokens, D hidden size, L MoE layers, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import MoELayer, MoEView
from expertcast_vllm.wiring import Kept, WiredLayer


class ForecastRouter(nn.Module):
    """A layer's router as transformers has it: from router inputs to logits, combine weights and ids, by vLLM's own
    routing rule. Its parameters are the gate's, under the same names."""

    def __init__(self, wired: WiredLayer, gate: dict[str, Tensor]) -> None:
        super().__init__()
        rule = wired.runner.router
        if not isinstance(rule, BaseRouter) or rule.eplb_state is not None:
            raise ExpertcastError(f"{wired.name} routes by {type(rule).__name__} with replicas: it cannot be forecast")
        for name, tensor in gate.items():
            self.register_parameter(name, nn.Parameter(tensor.detach(), requires_grad=False))
        self.top_k = rule.top_k
        self._rule = [rule]  # in a list: no part of the state dict
        self.factor = wired.runner.routed_scaling_factor
        """What combine weights are multiplied with after the experts."""

    def forward(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [T, E], combine weights and ids [T, K] (int64)."""
        weight_ED = self.get_parameter("weight")
        bias_E = self._parameters.get("bias")
        logits_TE = functional.linear(hidden_TD.to(weight_ED.dtype), weight_ED, bias_E)
        weights_TK, ids_TK = self._rule[0]._compute_routing(hidden_TD, logits_TE, None)
        return logits_TE, weights_TK * self.factor, ids_TK.long()


def view_of(layers: Sequence[WiredLayer], kept: Kept, model_id: str) -> MoEView:
    """The view of a model.

    Args:
        layers: of it, as they were found.
        kept: the gates' parameters as they were loaded.
        model_id: what the model is called.

    Raises:
        ExpertcastError: a gate is quantised, or routes in a way that cannot be asked for forecasts.
    """
    return MoEView(tuple(_layer(index, wired, kept) for index, wired in enumerate(layers)), model_id=model_id)


def _layer(index: int, wired: WiredLayer, kept: Kept) -> MoELayer:
    gate = dict(kept.get(wired.gate, {}))
    weight = gate.get("weight")
    if weight is None or weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ExpertcastError(f"the gate of {wired.name} has no plain weight: its experts cannot be forecast")
    router = ForecastRouter(wired, gate)
    block_name = wired.name.rpartition(".")[0]
    return MoELayer(
        index=index,
        block_name=block_name,
        norm_name="" if wired.norm is None else f"{block_name}.norm",
        router_name=f"{block_name}.gate",
        experts_name=wired.name,
        decoder=wired.decoder,
        block=wired.block,
        norm=nn.Identity() if wired.norm is None else wired.norm,
        router=router,
        experts=wired.runner.routed_experts,
        num_experts=weight.shape[0],
        top_k=router.top_k,
        hidden_size=weight.shape[1],
        has_shared=wired.runner.shared_experts is not None,
    )
