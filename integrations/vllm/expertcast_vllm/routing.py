"""How an offload hears what the model's routers choose."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from expertcast_vllm.operators import ROUTED

if TYPE_CHECKING:
    from expertcast_vllm.offload import WorkerOffload


def follow_routing(offload: WorkerOffload) -> None:
    """Tell the offload of every routing from now on."""
    modules = offload.config.compilation_config.static_forward_context.values()
    for runner in (module for module in modules if isinstance(module, MoERunner)):
        experts = runner.routed_experts
        assert experts in offload.layers, "other classes are refused before"
        runner.router.select_experts = partial(_select, runner.router.select_experts, experts.index)


def _select(
    select: Any, layer: int, hidden_states: Tensor, router_logits: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    weights_TK, ids_TK = select(hidden_states, router_logits, *args, **kwargs)
    ids_TK = ROUTED(hidden_states, router_logits, weights_TK, ids_TK, layer)
    return weights_TK, ids_TK
