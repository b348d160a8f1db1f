"""Estimator: the maps of `linear` plus a small network distilled from the model's routers.

T tokens, D hidden size, E routed experts, K experts per token, P = L - ahead layer pairs, F features. In the network:
width W and H hidden units of the residual MLP, which all pairs share:
x = A_l q + pos_l; h = x + C SiLU(B x); theta = W_l LN(h)
(after Madan et al., Speculating Experts, 2026, section 4, whose pairs share A and the head, and who have no maps).
Training: :mod:`expertcast.training.estimator`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from expertcast.predictors.base import Predictor, PredictorConfig, RouterState
from expertcast.predictors.folded import Maps
from expertcast.predictors.linear import Count, Linear, LinearConfig
from expertcast.predictors.view import ModelShape


class EstimatorNetwork(nn.Module):
    """Network for all layer pairs: each has its own projection A and its own head, initialised to zero.

    Args:
        pairs: P.
        features: F.
        experts: E.
        width: W.
        expansion: H / W.
    """

    def __init__(self, pairs: int, features: int, experts: int, *, width: int, expansion: float) -> None:
        super().__init__()
        hidden = round(expansion * width)
        self.projection_PFW = nn.Parameter(torch.randn(pairs, features, width) / features**0.5)
        self.position_PW = nn.Parameter(0.02 * torch.randn(pairs, width))
        self.up_WH = nn.Parameter(torch.randn(width, hidden) / width**0.5)
        self.down_HW = nn.Parameter(torch.randn(hidden, width) / hidden**0.5)
        self.norm = nn.LayerNorm(width)
        self.head_PWE = nn.Parameter(torch.zeros(pairs, width, experts))

    def forward(self, x_PTF: Tensor) -> Tensor:
        """Return logits [P, T, E] of all pairs at once, for training."""
        x_PTW = torch.bmm(x_PTF, self.projection_PFW) + self.position_PW[:, None]
        return torch.bmm(self._trunk(x_PTW), self.head_PWE)

    def one(self, x_TF: Tensor, pair: int) -> Tensor:
        """Return logits [T, E] of one pair: a row of :meth:`forward` without computing the others."""
        x_TW = torch.addmm(self.position_PW[pair], x_TF, self.projection_PFW[pair])
        return self._trunk(x_TW) @ self.head_PWE[pair]

    def _trunk(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.norm(x + functional.silu(x @ self.up_WH) @ self.down_HW)
        return hidden


@dataclass(kw_only=True)
class EstimatorConfig(LinearConfig):
    """Size, inputs and training of an estimator."""

    width: Annotated[int, Field(ge=1, le=10**6)] = 88
    """Width of the network."""
    expansion: Annotated[float, Field(ge=1e-3, le=1e3)] = 2.0
    """Hidden units of the residual MLP, as a multiple of its width."""
    learning_rate: Annotated[float, Field(ge=1e-12, le=1e3)] = 3e-3
    """Peak learning rate of the network (AdamW, warm-up and cosine)."""
    steps: Count = 1500
    """Maximum number of optimiser steps of the network."""
    patience: Count = 6
    """Validation rounds without improvement before training stops; a full run has twelve rounds."""

    def linear(self) -> LinearConfig:
        """Return the config of the maps below the network."""
        own = {key: getattr(self, key) for key in LinearConfig.__dataclass_fields__}
        own |= {"steps": min(self.steps, LinearConfig.steps), "learning_rate": LinearConfig.learning_rate}
        return LinearConfig(**own)


class Estimator(Linear):
    """Forecasts logits_{l+ahead} = x W + b + network(x) in fp32.

    The head is 0 for the layer pairs whose network gains nothing on validation.
    """

    name: ClassVar[str] = "estimator"
    config_class: ClassVar[type[PredictorConfig]] = EstimatorConfig
    config: EstimatorConfig

    def __init__(self, config: PredictorConfig, shape: ModelShape) -> None:
        assert isinstance(config, EstimatorConfig)
        super().__init__(config, shape)
        networks = {}
        for ahead in config.ahead:
            pairs = max(shape.layers - ahead, 0)
            networks[str(ahead)] = EstimatorNetwork(
                pairs, sum(self.sizes), shape.experts, width=config.width, expansion=config.expansion
            )
        self.networks = nn.ModuleDict(networks)

    def network(self, ahead: int) -> EstimatorNetwork:
        """The network for one distance."""
        module = self.networks[str(ahead)]
        assert isinstance(module, EstimatorNetwork)
        return module

    def logits(self, state: RouterState, ahead: int) -> Tensor:
        """Forecast logits [T, E] in fp32."""
        pair, x_TF = state.layer, self.features(state, ahead)
        weight_PFE, bias_PE = self.map_of(ahead)
        return torch.addmm(bias_PE[pair], x_TF, weight_PFE[pair]) + self.network(ahead).one(x_TF, pair)

    def maps(self, layer: int, ahead: int) -> Maps | None:
        """Return linear map and projection side by side; no projection where the head is 0."""
        network, experts = self.network(ahead), self.shape.experts
        head_WE, width = network.head_PWE[layer], network.position_PW.shape[1]
        if not head_WE.any():
            return super().maps(layer, ahead)
        weight_PFE, bias_PE = self.map_of(ahead)
        map_FX = torch.cat([weight_PFE[layer], network.projection_PFW[layer]], dim=1)
        bias_X = torch.cat([bias_PE[layer], network.position_PW[layer]])

        def refined(y_1X: Tensor) -> Tensor:
            base_1E, x_1W = y_1X.split_with_sizes([experts, width], dim=1)
            hidden_1W = torch.addmm(x_1W, functional.silu(x_1W @ network.up_WH), network.down_HW)
            return torch.addmm(base_1E, network.norm(hidden_1W), head_WE)

        return replace(self._folded(map_FX, bias_X, layer, ahead), then=refined)

    def rungs(self) -> Mapping[str, Predictor]:
        """Return the rungs of a `linear` with the same maps, then the estimator."""
        with torch.device("meta"):
            linear = Linear(self.config.linear(), self.shape)
        linear._buffers.update({name: self._buffers[name] for name in linear._buffers})
        linear.held, linear.calibration = self.held, {}
        return {**linear.bind(self.view).rungs(), self.name: self}
