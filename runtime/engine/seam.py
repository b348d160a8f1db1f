"""How a `transformers` model finds the engine that runs its experts.

The experts function that is registered here under :data:`EXPERTS_NAME` finds the engine of its module and calls
:meth:`Engine.run`.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.view import MoELayer
from expertcast.runtime.engine.base import Engine

EXPERTS_NAME = "expertcast"
"""Name of our experts function in transformers' registry."""

_RUNNING: WeakKeyDictionary[nn.Module, tuple[ref[Engine], int]] = WeakKeyDictionary()
"""Experts modules that are offloaded now, with their layer. The engine, which holds the model, lives in its hooks."""


def attach(engine: Engine, layer: MoELayer) -> None:
    """A layer's experts run from an engine's slots."""
    engine.attach(layer)
    _RUNNING[layer.experts] = (ref(engine), layer.index)


def detach(layer: MoELayer) -> None:
    """The layer's experts run no longer from slots; whose parameters they get is for others to say."""
    _RUNNING.pop(layer.experts, None)
    layer.experts.__dict__["num_experts"] = layer.num_experts  # a kernel that was interrupted left that of slots


def is_attached(model: nn.Module) -> bool:
    """Whether any experts module of the model is offloaded."""
    return any(module in _RUNNING for module in model.modules())


# traced, it would do its books once and for all: a compiled model is compiled around it
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _offloaded_experts(experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    found = _RUNNING.get(experts)
    engine = None if found is None else found[0]()
    if found is None or engine is None:
        raise ExpertcastError(
            f"experts implementation {EXPERTS_NAME!r} runs only inside expertcast.offload(model): set another one, "
            "such as 'grouped_mm' (or does this model share its config with an offloaded one?)"
        )
    with torch.no_grad():
        runs = engine if engine.stage is None else engine.stage
        output_TD = runs.run(engine.view[found[1]], hidden_states, top_k_index, top_k_weights)
    if torch.is_grad_enabled() and hidden_states.requires_grad:
        refused: Tensor = _NoBackward.apply(hidden_states, output_TD)  # type: ignore[no-untyped-call]
        return refused
    return output_TD


class _NoBackward(torch.autograd.Function):
    """A backward would find other experts in the slots: refuse it."""

    @staticmethod
    def forward(ctx: object, hidden_TD: Tensor, output_TD: Tensor) -> Tensor:
        del ctx, hidden_TD
        return output_TD.view_as(output_TD)

    @staticmethod
    def backward(ctx: object, *gradients: object) -> None:
        raise ExpertcastError("an offloaded model has no gradients: close the offload before training the model")


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _offloaded_experts)
