"""Predictors without learned maps: frequencies, the previous token, router inputs, and quasi-hidden states.

The quasi-hidden state is q_l = LN_{l+ahead}(r_l + d_l). The layer default d_l combines default vectors: the mean output
of each expert and of the shared experts (Madan et al., Speculating Experts, 2026, section 3.1).

T tokens, D hidden size, L MoE layers, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from expertcast.predictors.base import Forecast, Predictor, PredictorConfig, RouterState
from expertcast.predictors.folded import Maps, mixed, router_map
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import ModelShape

# Baselines: forecasts from counts and from the previous token


class Frequency(Predictor):
    """Forecasts the K experts with the highest counts at the target layer.

    Ids come from the counts, not from the router's rule over log counts: a correction bias would reorder them. Weights
    are the experts' mean combine weights, scaled to the layer's mean total.
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
        """Return log frequencies, with one added to each count; all T rows are equal."""
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
    """Forecasts the previous token's routing at the target layer; `frequency` for tokens without a previous token.

    Reads `RouterState.previous_logits_TLE`.
    """

    name: ClassVar[str] = "previous_token"
    uses_previous_token = True

    def logits(self, state: RouterState, ahead: int) -> Tensor:
        """Return the previous token's logits [T, E] at the target layer; log frequencies where it is unknown."""
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


# Predictors that run the target layer's router on an approximation of s_{l+ahead}


class ThroughRouter(Predictor):
    """Base of predictors that run the target's router on :meth:`input_vector`; ids and weights are the router's."""

    traceable = True

    @abstractmethod
    def input_vector(self, state: RouterState, ahead: int) -> Tensor:
        """Compute the approximation [T, D] of s_{l+ahead}."""

    def logits(self, state: RouterState, ahead: int) -> Tensor:
        return self.view[state.layer + ahead].router_logits(self.input_vector(state, ahead))

    def _forecast(self, state: RouterState, target: int, ahead: int) -> Forecast:
        # keep the router's three outputs: running the router again for its routing rule would double the cost
        logits_TE, weights_TK, ids_TK = self.view[target].routed(self.input_vector(state, ahead))
        return Forecast(layer=target, logits_TE=logits_TE, topk_ids_TK=ids_TK, topk_weights_TK=weights_TK)


class RouterInput(ThroughRouter):
    """Uses this layer's router input in place of the target's (the next-layer gate of Eliseev and Mazur, 2023)."""

    name: ClassVar[str] = "router_input"
    reads_residual = reads_routing = False

    def input_vector(self, state: RouterState, ahead: int) -> Tensor:
        """Return s_l [T, D]."""
        return state.router_input_TD


class NextNorm(ThroughRouter):
    """Uses this layer's residual in place of the target's, with the target layer's norm.

    The difference to `router_input` shows the gain of the target's norm; the difference to `quasi_hidden` shows the
    gain of the default vectors.
    """

    name: ClassVar[str] = "next_norm"
    reads_routing = False

    def input_vector(self, state: RouterState, ahead: int) -> Tensor:
        """Return LN_{l+ahead}(r_l) [T, D]."""
        return self.view[state.layer + ahead].router_input(state.residual_TD)


@dataclass(slots=True, kw_only=True)
class DefaultVectors:
    """Mean outputs of experts in fp32, with the counts behind them, so that two sets can be merged exactly."""

    expert_LED: Tensor
    """d_{l,e}: unweighted mean of expert e's output over the tokens routed to it; zero without such tokens."""
    shared_LD: Tensor
    """Mean output of the shared experts; zero for models without shared experts."""
    count_LE: Tensor
    """Tokens routed to each expert (int64); zero if unknown, as in a predictor's checkpoint."""
    token_count: int
    """Number of tokens; zero if unknown."""

    def as_tensors(self) -> dict[str, Tensor]:
        """Return the tensors by field name, for a safetensors file."""
        return {field.name: torch.as_tensor(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def of_shape(cls, shape: ModelShape) -> DefaultVectors:
        """Return tensors of the right shapes on the meta device, without values."""
        with torch.device("meta"):
            return cls(
                expert_LED=torch.empty(shape.layers, shape.experts, shape.hidden),
                shared_LD=torch.empty(shape.layers, shape.hidden),
                count_LE=torch.empty(shape.layers, shape.experts, dtype=torch.int64),
                token_count=0,
            )


class QuasiInput(Predictor):
    """Base of the predictors that read q_l; holds the default vectors in fp32."""

    traceable = True
    expert_LED: Tensor
    shared_LD: Tensor

    def __init__(self, config: PredictorConfig, shape: ModelShape) -> None:
        super().__init__(config, shape)
        self.register_buffer("expert_LED", torch.zeros(shape.layers, shape.experts, shape.hidden))
        self.register_buffer("shared_LD", torch.zeros(shape.layers, shape.hidden))

    def set_defaults(self, defaults: DefaultVectors) -> None:
        """Copy a model's default vectors into the predictor.

        Raises:
            ExpertcastError: the vectors come from a model of another shape.
        """
        if defaults.expert_LED.shape != self.expert_LED.shape:
            raise ExpertcastError(
                f"default vectors of shape {list(defaults.expert_LED.shape)} do not fit a model of "
                f"{self.shape.as_dict()}: collect them from this model with `expertcast collect`"
            )
        self.expert_LED.copy_(defaults.expert_LED)
        self.shared_LD.copy_(defaults.shared_LD)

    def input_vector(self, state: RouterState, ahead: int) -> Tensor:
        """Return q_l [T, D] in the dtype of the target's norm; r_l + d_l is summed in fp32.

        d_l is the sum over routed experts of weight x default vector, plus the shared experts' mean. Source: Madan et
        al., Speculating Experts, 2026, section 3.1.
        """
        rows_ED, shared_D = self.expert_LED[state.layer], self.shared_LD[state.layer].float()
        default_TD = mixed(rows_ED, shared_D, state.topk_ids_TK, state.topk_weights_TK)
        return self.view[state.layer + ahead].router_input(state.residual_TD.float() + default_TD)


class QuasiHidden(QuasiInput, ThroughRouter):
    """Runs the router of layer l + ahead on q_l; training only collects default vectors."""

    name: ClassVar[str] = "quasi_hidden"

    def maps(self, layer: int, ahead: int) -> Maps | None:
        found = router_map(self.view[layer + ahead])
        if found is None:
            return None
        defaults = self.expert_LED[layer], self.shared_LD[layer]
        return Maps(of={"quasi_hidden": found[0]}, bias_X=found[1], defaults=defaults)
