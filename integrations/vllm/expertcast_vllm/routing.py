"""How an offload hears what the model's routers choose."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from expertcast.predictors.errors import ExpertcastError

if TYPE_CHECKING:
    from expertcast_vllm.offload import WorkerOffload


def follow_routing(offload: WorkerOffload) -> None:
    """Tell the offload of every routing from now on.

    Raises:
        ExpertcastError: a layer of the model holds its experts in a class of its own.
    """
    index_of = {layer: layer.index for layer in offload.layers}
    modules = offload.config.compilation_config.static_forward_context.values()
    for runner in (module for module in modules if isinstance(module, MoERunner)):
        experts = runner.routed_experts
        if experts not in index_of:
            raise ExpertcastError(
                f"{runner.layer_name}: {type(experts).__name__} keeps experts in a way of its own: not supported, switch "
                "expertcast off for this model"
            )
        index = index_of[experts]
        runner.router.select_experts = partial(_select, runner.router.select_experts, offload, index)
        # vLLM compiles what its operators hold on the CPU only: whole, for a step over any experts
        alone = runner.shared_experts is None
        runner._forward_entry = torch.ops.vllm.moe_forward if alone else torch.ops.vllm.moe_forward_shared


def _select(
    select: Any, offload: WorkerOffload, index: int, hidden_states: Tensor, router_logits: Tensor, *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    weights_TK, ids_TK = select(hidden_states, router_logits, *args, **kwargs)
    offload.routed(index, hidden_states, router_logits, weights_TK, ids_TK)
    return weights_TK, ids_TK
