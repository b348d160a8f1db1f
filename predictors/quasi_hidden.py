"""Quasi-hidden state q_l = LN_{l+ahead}(r_l + d_l), d_l from default vectors: what each expert, and the shared experts,
put out on average. Speculating Experts, section 3.1 (rows B1-B5).

T tokens, D hidden size, L MoE layers, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from expertcast.predictors.base import Predictor, PredictorConfig, RouterState
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.through_router import ThroughRouter
from expertcast.predictors.view import ModelShape


@dataclass(slots=True, kw_only=True)
class DefaultVectors:
    """Mean outputs in fp32, with the counts they come from so that two sets can be merged exactly."""

    expert_LED: Tensor
    """d_{l,e}: raw mean of expert e's output over the tokens routed to it; zero where it was never routed to."""
    shared_LD: Tensor
    """Mean output of the shared experts; zero for models without."""
    count_LE: Tensor
    """Tokens routed to each expert (int64); zero where they are not known, as in a predictor's checkpoint."""
    token_count: int
    """Tokens seen; zero where that is not known."""

    def as_tensors(self) -> dict[str, Tensor]:
        """By field name, as a file of tensors holds them."""
        return {field.name: torch.as_tensor(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def of_shape(cls, shape: ModelShape) -> DefaultVectors:
        """Without values (meta device): the tensors that a model of this shape has."""
        with torch.device("meta"):
            return cls(
                expert_LED=torch.empty(shape.layers, shape.experts, shape.hidden),
                shared_LD=torch.empty(shape.layers, shape.hidden),
                count_LE=torch.empty(shape.layers, shape.experts, dtype=torch.int64),
                token_count=0,
            )

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> DefaultVectors:
        """What :meth:`as_tensors` gave, with the same names and shapes."""
        return cls(**{**tensors, "token_count": int(tensors["token_count"])})  # type: ignore[arg-type]


def layer_default(expert_ED: Tensor, shared_D: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """d_l [T, D] = sum over routed experts of weight x default vector, plus the shared experts' mean.

    Section 3.1, in fp32. `expert_ED` and `shared_D` are the layer's default vectors, `ids_TK` the experts
    that tokens are routed to, `weights_TK` the model's own combine weights.
    """
    return weighted_rows(weights_TK.float(), expert_ED.float(), ids_TK) + shared_D.float()


def weighted_rows(weights_TK: Tensor, row_ED: Tensor, ids_TK: Tensor) -> Tensor:
    """sum_k weights_TK[t, k] row_ED[ids_TK[t, k]] as [T, D], by fewer operations than `einsum`."""
    return torch.bmm(weights_TK.unsqueeze(1), functional.embedding(ids_TK, row_ED)).squeeze(1)


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
