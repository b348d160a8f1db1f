"""Predictors without learned maps: frequencies, the previous token, router inputs, and quasi-hidden states.

Quasi-hidden state: q_l = LN_{l+ahead}(r_l + d_l), d_l from default vectors, the mean output of each expert and of the
shared experts (Speculating Experts, section 3.1).

T tokens, D hidden size, L MoE layers, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from expertcast.predictors.base import Forecast, Predictor, PredictorConfig, RouterState
from expertcast.predictors.folded import Maps, router_map
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import ModelShape

# Floors for other predictors


class Frequency(Predictor):
    """Forecasts the K experts with the highest counts at the target layer.

    Ids come from the counts themselves, not from the router's rule over log counts: a correction bias would
    reorder them. Weights are the experts' mean combine weights, scaled to the layer's mean total.
    """

    name: ClassVar[str] = "frequency"
    reads_residual = reads_routing = False
    traceable = True
    count_LE: Tensor
    weight_sum_LE: Tensor

    def __init__(self, config: PredictorConfig, shape: ModelShape) -> None:
        super().__init__(config, shape)
        size = (shape.layers, shape.experts)
        self.register_buffer("count_LE", torch.zeros(size, dtype=torch.int64))
        self.register_buffer("weight_sum_LE", torch.zeros(size))

    def observe(self, layer: int, ids_TK: Tensor, weights_TK: Tensor) -> None:
        """Add the routing of T tokens at one layer to the counts."""
        ids, weights = ids_TK.flatten(), weights_TK.flatten().float()
        self.count_LE[layer].index_add_(0, ids, torch.ones_like(ids))
        self.weight_sum_LE[layer].index_add_(0, ids, weights)

    def logits(self, state: RouterState, ahead: int) -> Tensor:
        """Log of the share of routings (with one added to each count), the same [E] row for every token."""
        count_E = self.count_LE[state.layer + ahead].float() + 1
        return (count_E / count_E.sum()).log().expand(state.logits_TE.shape[0], -1)

    def _forecast(self, state: RouterState, target: int, ahead: int) -> Forecast:
        tokens = state.logits_TE.shape[0]
        count_E, weight_sum_E = self.count_LE[target], self.weight_sum_LE[target]
        ids_K = count_E.topk(self.shape.top_k).indices
        weights_K = weight_sum_E[ids_K] / count_E[ids_K].clamp(min=1)
        mean_total = weight_sum_E.sum() * self.shape.top_k / count_E.sum().clamp(min=1)
        weights_K = weights_K * (mean_total / weights_K.sum().clamp(min=torch.finfo(torch.float32).tiny))
        return Forecast(
            layer=target,
            logits_TE=self.logits(state, ahead),
            topk_ids_TK=ids_K.expand(tokens, -1),
            topk_weights_TK=weights_K.to(state.topk_weights_TK.dtype).expand(tokens, -1),
        )


class PreviousToken(Frequency):
    """The routing that the previous token had at the target layer; `frequency` where there is no previous token.

    Needs `RouterState.previous_logits_TLE`.
    """

    name: ClassVar[str] = "previous_token"
    uses_previous_token = True

    def logits(self, state: RouterState, ahead: int) -> Tensor:
        """The previous token's logits [T, E] at the target layer, log frequencies in rows without one."""
        fallback_TE = super().logits(state, ahead)
        if state.previous_logits_TLE is None:
            return fallback_TE
        previous_TE = state.previous_logits_TLE[:, state.layer + ahead]
        return torch.where(previous_TE.isnan(), fallback_TE.to(previous_TE.dtype), previous_TE)

    def _forecast(self, state: RouterState, target: int, ahead: int) -> Forecast:
        fallback = super()._forecast(state, target, ahead)
        if state.previous_logits_TLE is None:
            return fallback
        known_T1 = ~state.previous_logits_TLE[:, target, :1].isnan()
        ids_TK, weights_TK = self.view[target].route(fallback.logits_TE)
        return Forecast(
            layer=target,
            logits_TE=fallback.logits_TE,
            topk_ids_TK=torch.where(known_T1, ids_TK, fallback.topk_ids_TK),
            topk_weights_TK=torch.where(known_T1, weights_TK, fallback.topk_weights_TK.to(weights_TK.dtype)),
        )


# Predictors that send a stand-in for s_{l+ahead} through the router of the target layer


class ThroughRouter(Predictor):
    """Subclasses give :meth:`input_vector`; ids and weights are what the target's router returns for it."""

    traceable = True

    @abstractmethod
    def input_vector(self, state: RouterState, ahead: int) -> Tensor:
        """The [T, D] vector that stands for s_{l+ahead}."""

    def logits(self, state: RouterState, ahead: int) -> Tensor:
        return self.view[state.layer + ahead].router_logits(self.input_vector(state, ahead))

    def _forecast(self, state: RouterState, target: int, ahead: int) -> Forecast:
        # the router's own three outputs: a second run of it for the routing rule would cost a decode step twice
        logits_TE, weights_TK, ids_TK = self.view[target].routed(self.input_vector(state, ahead))
        return Forecast(layer=target, logits_TE=logits_TE, topk_ids_TK=ids_TK, topk_weights_TK=weights_TK)


class RouterInput(ThroughRouter):
    """Takes the router input of this layer for that of a later one: the next-layer gate of Eliseev and Mazur."""

    name: ClassVar[str] = "router_input"
    reads_residual = reads_routing = False

    def input_vector(self, state: RouterState, ahead: int) -> Tensor:
        """s_l [T, D], as the router of layer l read it."""
        return state.router_input_TD


class NextNorm(ThroughRouter):
    """Takes this layer's residual for that of a later one, under the later one's norm.

    It stands between `router_input` and `quasi_hidden`, so that the gain of the target's norm and the gain of the
    default vectors can be told apart (trap 4 under system B).
    """

    name: ClassVar[str] = "next_norm"
    reads_routing = False

    def input_vector(self, state: RouterState, ahead: int) -> Tensor:
        """LN_{l+ahead}(r_l) [T, D]."""
        return self.view[state.layer + ahead].router_input(state.residual_TD)


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

    def maps(self, layer: int, ahead: int) -> Maps | None:
        found = router_map(self.view[layer + ahead])
        if found is None:
            return None
        defaults = self.expert_LED[layer], self.shared_LD[layer]
        return Maps(of={"quasi_hidden": found[0]}, bias_X=found[1], defaults=defaults)
