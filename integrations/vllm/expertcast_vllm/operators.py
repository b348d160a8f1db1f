"""Operators that torch.compile and CUDA graphs take as they are: what is decided inside is decided at every step.

They stand where vLLM calls its own kernel, so that what is compiled around them is what is compiled around that.
T tokens, D hidden size, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import direct_register_custom_op

from expertcast_vllm.names import OFFLOAD

if TYPE_CHECKING:
    from expertcast_vllm.offload import WorkerOffload


def _running() -> WorkerOffload:
    """Of the model that runs. Compiled code outlives its process: it holds the numbers of layers only."""
    offload: WorkerOffload = get_forward_context().no_compile_layers[OFFLOAD]
    return offload


def routed(hidden_states: Tensor, router_logits: Tensor, topk_weights: Tensor, topk_ids: Tensor, layer: int) -> Tensor:
    """A layer's router has run; gives its choice [T, K] back, which the layer's experts are to be called with."""
    ids = _running().routed(layer, hidden_states, router_logits, topk_weights, topk_ids)
    return ids.clone() if ids is topk_ids else ids


def run(hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, layer: int) -> Tensor:
    """A layer's experts over [T, D]."""
    return _running().run(layer, hidden_states, topk_ids, topk_weights)


def _like_ids(
    hidden_states: Tensor, router_logits: Tensor, topk_weights: Tensor, topk_ids: Tensor, layer: int
) -> Tensor:
    return torch.empty_like(topk_ids)


def _like_hidden(hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, layer: int) -> Tensor:
    return torch.empty_like(hidden_states)


direct_register_custom_op(op_name="expertcast_routed", op_func=routed, fake_impl=_like_ids)
direct_register_custom_op(op_name="expertcast_run", op_func=run, fake_impl=_like_hidden)

ROUTED = torch.ops.vllm.expertcast_routed
"""The operator of :func:`routed`."""
RUN = torch.ops.vllm.expertcast_run
"""The operator of :func:`run`."""
