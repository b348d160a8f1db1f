"""Estimator: ridge regression plus a small network distilled from the model's routers.

`form=paper` is the published network alone.

T tokens, D hidden size, E routed experts, K experts per token, P = L - ahead layer pairs, F features. In the network:
G groups of pairs that share a projection and a head, width W and H hidden units of the residual MLP:
x = A q + pos_l; h = x + C SiLU(B x); theta = W_head LN(h)
(Madan et al., Speculating Experts, 2026, section 4). Training: :mod:`expertcast.training.estimator`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from expertcast.predictors.base import Predictor, PredictorConfig, RouterState
from expertcast.predictors.baselines import QuasiHidden, QuasiInput
from expertcast.predictors.early_attention import EarlyConfig, LooksEarly, StandIn
from expertcast.predictors.folded import Maps
from expertcast.predictors.linear import RidgeConfig
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import ModelShape

WIDTH_STEP = 8


class EstimatorNetwork(nn.Module):
    """Network for all layer pairs; its width follows from a parameter budget.

    With `shared`, all pairs share everything but the layer embedding pos_l, as in the paper. Otherwise each pair has
    its own projection A and its own head, initialised to zero, and only the residual MLP is shared.

    Args: those of :func:`fitting_width`.
    """

    def __init__(
        self, pairs: int, features: int, experts: int, *, parameters: int, expansion: float, shared: bool
    ) -> None:
        super().__init__()
        groups = 1 if shared else pairs
        width = fitting_width(pairs, features, experts, parameters=parameters, expansion=expansion, shared=shared)
        hidden = round(expansion * width)
        self.projection_GFW = nn.Parameter(torch.randn(groups, features, width) / features**0.5)
        self.position_PW = nn.Parameter(0.02 * torch.randn(pairs, width))
        self.up_WH = nn.Parameter(torch.randn(width, hidden) / width**0.5)
        self.down_HW = nn.Parameter(torch.randn(hidden, width) / hidden**0.5)
        self.norm = nn.LayerNorm(width)
        # the residual form starts at the ridge solution (zero head); the paper's form needs non-zero initial logits
        scale = width**-0.5 if shared else 0.0
        self.head_GWE = nn.Parameter(scale * torch.randn(groups, width, experts))

    def forward(self, x_PTF: Tensor) -> Tensor:
        """Return logits [P, T, E] of all pairs at once, for training."""
        x_PTW = _apply(x_PTF, self.projection_GFW) + self.position_PW[:, None]
        return _apply(self._trunk(x_PTW), self.head_GWE)

    def one(self, x_TF: Tensor, pair: int) -> Tensor:
        """Return logits [T, E] of one pair: a row of :meth:`forward` without computing the others."""
        group = pair if len(self.projection_GFW) > 1 else 0
        x_TW = torch.addmm(self.position_PW[pair], x_TF, self.projection_GFW[group])
        return self._trunk(x_TW) @ self.head_GWE[group]

    def _trunk(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.norm(x + functional.silu(x @ self.up_WH) @ self.down_HW)
        return hidden


def fitting_width(pairs: int, features: int, experts: int, *, parameters: int, expansion: float, shared: bool) -> int:
    """Return the largest width W, a multiple of 8, whose network stays within the parameter budget.

    Args:
        pairs: P.
        features: F.
        experts: E.
        parameters: budget in parameters.
        expansion: H / W.
        shared: whether all pairs share one projection and one head.

    Raises:
        ExpertcastError: a network of width 8 exceeds the budget.
    """
    groups = 1 if shared else pairs

    def count(width: int) -> int:
        return width * (groups * (features + experts) + pairs + 2) + 2 * width * round(expansion * width)

    if count(WIDTH_STEP) > parameters:
        raise ExpertcastError(
            f"parameters={parameters}: too few for {pairs} layer pairs with {features} inputs and {experts} experts, "
            f"use at least {count(WIDTH_STEP)}"
        )
    fits, exceeds = 1, 2  # in steps of the width
    while count(exceeds * WIDTH_STEP) <= parameters:
        fits, exceeds = exceeds, 2 * exceeds
    while exceeds - fits > 1:
        middle = (fits + exceeds) // 2
        fits, exceeds = (middle, exceeds) if count(middle * WIDTH_STEP) <= parameters else (fits, middle)
    return fits * WIDTH_STEP


def _apply(x_PTF: Tensor, map_GFE: Tensor) -> Tensor:
    return x_PTF @ map_GFE[0] if len(map_GFE) == 1 else torch.bmm(x_PTF, map_GFE)


Count = Annotated[int, Field(ge=1, le=10**9)]
HIDDEN_INPUTS = ("quasi_hidden", "router_input", "early")
INPUTS = (*HIDDEN_INPUTS, "routing", "previous")


@dataclass(kw_only=True)
class EstimatorConfig(RidgeConfig, EarlyConfig):
    """Size, inputs and training of an estimator."""

    form: Literal["residual", "paper"] = "residual"
    """`residual` adds a network to ridge regression; `paper` is the published network alone, trained with plain KL."""
    parameters: Annotated[int, Field(ge=1, le=10**12)] = 800_000
    """Parameter budget of the network, for each distance."""
    expansion: Annotated[float, Field(ge=1e-3, le=1e3)] = 2.0
    """Hidden units of the residual MLP, as a multiple of its width."""
    inputs: Sequence[str] = ()
    """Inputs: `quasi_hidden` (q_l), `router_input` (s_l), `early` (the residual after early attention, through the
    target's norm), `routing` (combine weights as a row over experts), `previous` (the previous token's router logits at
    the target layer). Empty: all inputs in the traces."""
    temperature: Annotated[float, Field(ge=1e-12, le=1e3)] = 1.0
    """Temperature of the loss."""
    learning_rate: Annotated[float, Field(ge=1e-12, le=1e3)] = 3e-3
    """Peak learning rate (AdamW, warm-up and cosine)."""
    weight_decay: Annotated[float, Field(ge=0, le=1e3)] = 0.01
    """Weight decay."""
    step_tokens: Count = 512
    """Tokens per optimiser step (each is one example per layer pair)."""
    steps: Count = 1500
    """Maximum number of optimiser steps."""
    passes: Count = 30
    """Maximum number of passes over the training tokens."""
    patience: Count = 4
    """Validation rounds without improvement before training stops; a full run has twelve rounds."""

    def __post_init__(self) -> None:
        RidgeConfig.__post_init__(self)
        self.inputs = ["quasi_hidden"] if self.form == "paper" else list(self.inputs)
        named = [name for name in INPUTS if name in self.inputs]
        if self.inputs and (len(named) < len(self.inputs) or "quasi_hidden" not in named):
            raise ExpertcastError(
                f"inputs={self.inputs}: name quasi_hidden, and any of {', '.join(INPUTS[1:])}, each once"
            )
        self.inputs = named  # features are concatenated in the order of INPUTS


class Estimator(LooksEarly, QuasiInput):
    """Forecasts logits_{l+ahead} = ridge(x) + gain x network(x) in fp32, with x the standardised inputs.

    The gain is one number per layer pair: the standard deviation of the pair's logits times a gate chosen on
    validation. Gain 0 leaves ridge regression alone. The paper's form has no ridge term, gain 1, and inputs that are
    not standardised.
    """

    name: ClassVar[str] = "estimator"
    config_class: ClassVar[type[PredictorConfig]] = EstimatorConfig
    config: EstimatorConfig

    def __init__(self, config: PredictorConfig, shape: ModelShape) -> None:
        assert isinstance(config, EstimatorConfig)
        super().__init__(config, shape)
        self.inputs = config.inputs or [name for name in INPUTS if name != "early"]
        features = sum(shape.hidden if name in HIDDEN_INPUTS else shape.experts for name in self.inputs)
        self.uses_previous_token, self.uses_early = "previous" in self.inputs, "early" in self.inputs
        self.held = StandIn(shape, config.stand_in_rank or 0) if self.uses_early else None
        if self.uses_previous_token:
            self.register_buffer("usual_LE", torch.zeros(shape.layers, shape.experts))
        networks = {}
        for ahead in config.ahead:
            pairs = max(shape.layers - ahead, 0)
            self.register_buffer(f"mean_PF_{ahead}", torch.zeros(pairs, features))
            self.register_buffer(f"inverse_PF_{ahead}", torch.ones(pairs, features))
            if config.form == "residual":
                self.register_buffer(f"weight_PFE_{ahead}", torch.zeros(pairs, features, shape.experts))
            self.register_buffer(f"bias_PE_{ahead}", torch.zeros(pairs, shape.experts))
            self.register_buffer(f"gain_P_{ahead}", torch.ones(pairs))
            networks[str(ahead)] = EstimatorNetwork(
                pairs,
                features,
                shape.experts,
                parameters=config.parameters,
                expansion=config.expansion,
                shared=config.form == "paper",
            )
        self.networks = nn.ModuleDict(networks)

    def network(self, ahead: int) -> EstimatorNetwork:
        """The network for one distance."""
        module = self.networks[str(ahead)]
        assert isinstance(module, EstimatorNetwork)
        return module

    def features(self, state: RouterState, ahead: int) -> Tensor:
        """Return the inputs concatenated, [T, F] in fp32, before standardisation."""
        parts = [self.input_vector(state, ahead).float()]
        if "router_input" in self.inputs:
            parts.append(state.router_input_TD.float())
        if "early" in self.inputs:
            parts.append(self.early_input(state, ahead).float())
        if "routing" in self.inputs:
            weights_TK = state.topk_weights_TK.float()
            routing_TE = weights_TK.new_zeros(len(weights_TK), self.shape.experts)
            parts.append(routing_TE.scatter_(1, state.topk_ids_TK, weights_TK))
        if "previous" in self.inputs:
            parts.append(self._previous(state, state.layer + ahead))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _previous(self, state: RouterState, target: int) -> Tensor:
        """Return the previous token's centred logits [T, E] at the target layer; if unknown, their training mean."""
        usual_E = self.get_buffer("usual_LE")[target]
        if state.previous_logits_TLE is None:
            return usual_E.expand(len(state.residual_TD), -1)
        logits_TE = state.previous_logits_TLE[:, target].float()
        centred_TE = logits_TE - logits_TE.mean(dim=1, keepdim=True)
        return torch.where(centred_TE.isnan(), usual_E, centred_TE)

    def standardised(self, x_PTF: Tensor, ahead: int) -> Tensor:
        """Standardise the inputs [P, T, F] of all pairs: zero mean and unit variance on the training tokens."""
        return (x_PTF - self._buffer("mean_PF", ahead)[:, None]) * self._buffer("inverse_PF", ahead)[:, None]

    def base(self, x_PTF: Tensor, ahead: int) -> Tensor:
        """Return the ridge (or bias) term [P, T, E] of all pairs from standardised inputs."""
        bias_P1E = self._buffer("bias_PE", ahead)[:, None]
        if self.config.form == "paper":
            return bias_P1E
        return torch.baddbmm(bias_P1E, x_PTF, self._buffer("weight_PFE", ahead))

    def logits(self, state: RouterState, ahead: int) -> Tensor:
        """Forecast logits [T, E] in fp32."""
        pair = state.layer
        x_TF = self.features(state, ahead)
        x_TF = (x_TF - self._buffer("mean_PF", ahead)[pair]) * self._buffer("inverse_PF", ahead)[pair]
        base_TE = self._buffer("bias_PE", ahead)[pair]
        if self.config.form == "residual":
            base_TE = torch.addmm(base_TE, x_TF, self._buffer("weight_PFE", ahead)[pair])
        return base_TE + self._buffer("gain_P", ahead)[pair] * self.network(ahead).one(x_TF, pair)

    def maps(self, layer: int, ahead: int) -> Maps | None:
        """Fold the standardisation into ridge map and projection, side by side; no projection where the gain is 0."""
        if self.config.form != "residual":
            return None
        mean_F, inverse_F, map_FX, bias_X, gain = (
            self._buffer(name, ahead)[layer] for name in ("mean_PF", "inverse_PF", "weight_PFE", "bias_PE", "gain_P")
        )
        network, experts = self.network(ahead), self.shape.experts
        if gain:
            map_FX = torch.cat([map_FX, network.projection_GFW[layer]], dim=1)
            bias_X = torch.cat([bias_X, network.position_PW[layer]])
        map_FX = inverse_F[:, None] * map_FX
        bias_X = bias_X - mean_F @ map_FX
        sizes = [self.shape.hidden if name in HIDDEN_INPUTS else experts for name in self.inputs]
        of, usual_E = dict(zip(self.inputs, map_FX.split_with_sizes(sizes), strict=True)), None
        if "previous" in of:  # fold the centring and the training mean
            usual_E = self.get_buffer("usual_LE")[layer + ahead]
            bias_X = bias_X + usual_E @ of["previous"]
            of["previous"] = of["previous"] - of["previous"].mean(dim=0)

        def refined(y_1X: Tensor) -> Tensor:
            base_1E, x_1W = y_1X.split_with_sizes([experts, width], dim=1)
            hidden_1W = torch.addmm(x_1W, functional.silu(x_1W @ network.up_WH), network.down_HW)
            return torch.addmm(base_1E, network.norm(hidden_1W), head_WE)

        head_WE, width = gain * network.head_GWE[layer], network.position_PW.shape[1]
        defaults = self.expert_LED[layer], self.shared_LD[layer]
        return Maps(of=of, bias_X=bias_X, then=refined if gain else None, usual_E=usual_E, defaults=defaults)

    def rungs(self) -> Mapping[str, Predictor]:
        """Return `quasi_hidden` with the same default vectors, then the estimator."""
        cheap = QuasiHidden(PredictorConfig(ahead=self.ahead), self.shape)
        cheap.expert_LED, cheap.shared_LD = self.expert_LED, self.shared_LD
        return {cheap.name: cheap.bind(self.view), self.name: self}

    def _buffer(self, name: str, ahead: int) -> Tensor:
        return self.get_buffer(f"{name}_{ahead}")
