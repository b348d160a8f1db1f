"""Ridge regression from q_l or s_l to the target router's logits, one map per layer pair.

T tokens, D hidden size, E routed experts per layer, P = L - ahead layer pairs (source l, target l + ahead).
:mod:`expertcast.training.linear` computes the maps in closed form; this module applies them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from expertcast.predictors.base import PredictorConfig, RouterState
from expertcast.predictors.baselines import QuasiInput
from expertcast.predictors.folded import Maps
from expertcast.predictors.view import ModelShape


@dataclass(kw_only=True)
class RidgeConfig(PredictorConfig):
    """Regularisation of a ridge regression."""

    strengths: Annotated[Sequence[Annotated[float, Field(gt=0)]], Field(min_length=1)] = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
    """Ridge strengths to choose from on validation, relative to each input's variance."""

    def __post_init__(self) -> None:
        PredictorConfig.__post_init__(self)
        self.strengths = list(self.strengths)


@dataclass(kw_only=True)
class LinearConfig(RidgeConfig):
    """Regularisation and input of `linear`."""

    reads: Literal["quasi_hidden", "router_input"] = "quasi_hidden"
    """Input of the regression: quasi_hidden, or router_input, which needs no default vectors."""


class Linear(QuasiInput):
    """Forecasts logits_{l+ahead} = x W + b in fp32, with x = q_l, or s_l for `reads=router_input`."""

    name: ClassVar[str] = "linear"
    config_class: ClassVar[type[PredictorConfig]] = LinearConfig

    config: LinearConfig

    def __init__(self, config: PredictorConfig, shape: ModelShape) -> None:
        assert isinstance(config, LinearConfig)
        super().__init__(config, shape)
        if config.reads == "router_input":
            self.reads_residual = self.reads_routing = False
            del self.expert_LED, self.shared_LD
        for ahead in config.ahead:
            pairs = max(shape.layers - ahead, 0)
            self.register_buffer(f"weight_PDE_{ahead}", torch.zeros(pairs, shape.hidden, shape.experts))
            self.register_buffer(f"bias_PE_{ahead}", torch.zeros(pairs, shape.experts))
            self.register_buffer(f"strength_P_{ahead}", torch.zeros(pairs))

    def set_map(self, ahead: int, weight_PDE: Tensor, bias_PE: Tensor, strength_P: Tensor) -> None:
        """Set W, b and (for the record) the ridge strength of each layer pair at one distance."""
        for name, value in (("weight_PDE", weight_PDE), ("bias_PE", bias_PE), ("strength_P", strength_P)):
            self.get_buffer(f"{name}_{ahead}").copy_(value)

    def input_vector(self, state: RouterState, ahead: int) -> Tensor:
        """Return x [T, D]."""
        if self.config.reads == "router_input":
            return state.router_input_TD
        return super().input_vector(state, ahead)

    def maps(self, layer: int, ahead: int) -> Maps:
        weight_DE, bias_E = (self.get_buffer(f"{name}_{ahead}")[layer] for name in ("weight_PDE", "bias_PE"))
        if self.config.reads == "router_input":
            return Maps(of={"router_input": weight_DE}, bias_X=bias_E)
        defaults = self.expert_LED[layer], self.shared_LD[layer]
        return Maps(of={"quasi_hidden": weight_DE}, bias_X=bias_E, defaults=defaults)

    def logits(self, state: RouterState, ahead: int) -> Tensor:
        """Return x W + b [T, E] in fp32."""
        weight_DE = self.get_buffer(f"weight_PDE_{ahead}")[state.layer]
        bias_E = self.get_buffer(f"bias_PE_{ahead}")[state.layer]
        return torch.addmm(bias_E, self.input_vector(state, ahead).float(), weight_DE)
