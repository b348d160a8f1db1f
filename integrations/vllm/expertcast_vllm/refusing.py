"""What is refused while vLLM makes a model, before it reads any weights."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from expertcast.predictors.messages import ExpertcastError
from expertcast_vllm.settings import Settings

if TYPE_CHECKING:
    from expertcast_vllm.offload import WorkerOffload

_REFUSES = "refuses_for_expertcast"


def refuse_other_experts(ours: type[RoutedExperts]) -> None:
    """Have layers of routed experts that are not `ours` refused where expertcast is asked for: models with a class of
    their own pass by vLLM's registry. A second call does nothing."""
    make = RoutedExperts.__init__
    if hasattr(make, _REFUSES):
        return

    @wraps(make)
    def made(self: RoutedExperts, layer_name: str, *args: Any, **kwargs: Any) -> None:
        if not isinstance(self, ours) and Settings.of(get_current_vllm_config().additional_config) is not None:
            raise ExpertcastError(
                f"{layer_name}: {type(self).__name__} keeps experts in a way of its own: not supported, switch "
                "expertcast off for this model"
            )
        make(self, layer_name, *args, **kwargs)

    setattr(made, _REFUSES, True)
    RoutedExperts.__init__ = made


def check_shape(offload: WorkerOffload) -> None:
    """Whether a predictor's checkpoint can be of the model whose first layer is made; its weights are compared when
    they have come.

    Raises:
        ExpertcastError: experts, how many of them a token takes, or hidden sizes differ.
    """
    checkpoint, config = offload.checkpoint, offload.config.model_config
    if checkpoint is None:
        return
    trained = checkpoint.config["shape"]
    found = {"E": offload.shape.experts, "K": offload.shape.top_k, "D": config.get_hidden_size()}
    for size, words in (("E", "experts per layer"), ("K", "experts per token"), ("D", "as hidden size")):
        if trained[size] != found[size]:
            raise ExpertcastError(
                f"{checkpoint.folder} was trained for {checkpoint.config['model_id']!r} with {trained[size]} {words}, "
                f"and {str(config.model)!r} has {found[size]}: train a predictor for this model with `expertcast train`"
            )
