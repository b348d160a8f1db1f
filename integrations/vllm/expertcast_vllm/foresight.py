"""What forecasts are made with under vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.view import MoELayer, MoEView
from expertcast.runtime.engine.drift import DriftMonitor
from expertcast.runtime.engine.speculation import Speculator

if TYPE_CHECKING:
    from expertcast_vllm.offload import WorkerOffload


def make_speculator(offload: WorkerOffload) -> tuple[Speculator, DriftMonitor | None]:
    """What forecasts, and what follows its recall.

    Raises:
        ExpertcastError: a predictor is asked for.
    """
    if offload.settings.offload.resolved_predictor() is not None:
        raise ExpertcastError("forecasts are not made under vLLM yet: leave predictor out")
    return Speculator(_view(offload), None), None


def _view(offload: WorkerOffload) -> MoEView:
    shape = offload.shape
    layers = [
        MoELayer(
            index=index, block_name=layer.layer_name, norm_name="", router_name="", experts_name=layer.layer_name,
            decoder=nn.Module(), block=nn.Module(), norm=nn.Identity(), router=nn.Module(), experts=layer,
            num_experts=shape.experts, top_k=shape.top_k, hidden_size=shape.hidden, has_shared=False,
        )
        for index, layer in enumerate(offload.layers)
    ]  # fmt: skip
    return MoEView(tuple(layers), model_id=offload.config.model_config.model)
