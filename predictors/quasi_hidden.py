"""Quasi-hidden state q_l = LN_{l+ahead}(r_l + d_l): Speculating Experts, section 3.1 (rows B1-B5).

T tokens, D hidden size, L MoE layers, E routed experts per layer.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from expertcast.predictors.base import Predictor, PredictorConfig, RouterState
from expertcast.predictors.defaults import DefaultVectors, layer_default
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.through_router import ThroughRouter
from expertcast.predictors.view import ModelShape


class QuasiInput(Predictor):
    """Base of the predictors that read q_l: it holds the default vectors in fp32."""

    traceable = True
    expert_LED: Tensor
    shared_LD: Tensor

    def __init__(self, config: PredictorConfig, shape: ModelShape) -> None:
        super().__init__(config, shape)
        self.register_buffer("expert_LED", torch.zeros(shape.layers, shape.experts, shape.hidden))
        self.register_buffer("shared_LD", torch.zeros(shape.layers, shape.hidden))

    def set_defaults(self, defaults: DefaultVectors) -> None:
        """Take the default vectors of a model.

        Raises:
            ExpertcastError: they were collected from a model of another shape.
        """
        if defaults.expert_LED.shape != self.expert_LED.shape:
            raise ExpertcastError(
                f"default vectors of shape {list(defaults.expert_LED.shape)} do not fit a model of "
                f"{self.shape.as_dict()}: collect them from this model with `expertcast collect`"
            )
        self.expert_LED.copy_(defaults.expert_LED)
        self.shared_LD.copy_(defaults.shared_LD)

    def input_vector(self, state: RouterState, ahead: int) -> Tensor:
        """q_l [T, D] in the dtype of the target's norm; the sum r_l + d_l is taken in fp32."""
        layer = state.layer
        default_TD = layer_default(
            self.expert_LED[layer], self.shared_LD[layer], state.topk_ids_TK, state.topk_weights_TK
        )
        return self.view[layer + ahead].router_input(state.residual_TD.float() + default_TD)


class QuasiHidden(QuasiInput, ThroughRouter):
    """q_l through the router of layer l + ahead; trained by collecting default vectors only."""

    name: ClassVar[str] = "quasi_hidden"
