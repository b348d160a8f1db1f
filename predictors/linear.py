"""Linear maps from a layer's known state to the router logits of a later layer, one map per layer pair.

T tokens, D hidden size, E routed experts, F features, P = L - ahead layer pairs (source l, target l + ahead).
:mod:`expertcast.training.linear` fits the maps: ridge regression towards the target's own router, then distillation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from expertcast.predictors.base import Predictor, PredictorConfig, RouterState
from expertcast.predictors.baselines import QuasiHidden, QuasiInput
from expertcast.predictors.early_attention import EarlyConfig, LooksEarly, StandIn
from expertcast.predictors.folded import Maps
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import ModelShape

HIDDEN_INPUTS = ("early", "quasi_hidden", "router_input")
"""Inputs of the hidden size; the first that a predictor reads is closest to the target router's input."""
INPUTS = (*HIDDEN_INPUTS, "routing", "previous")
WIDE = 1024
"""Hidden size above which a predictor reads one hidden input by default: three would triple the time of a forecast and
take nine times the memory and time of training, for .006 of recall (bundled model)."""


def default_inputs(shape: ModelShape, without: Sequence[str] = ()) -> list[str]:
    """Return the inputs that a predictor reads by default: all but those of `without`, or fewer for wide models."""
    known = [name for name in INPUTS if name not in without]
    hidden = [name for name in HIDDEN_INPUTS if name in known]
    return [name for name in known if name not in hidden[1:]] if shape.hidden > WIDE else known


Count = Annotated[int, Field(ge=1, le=10**9)]


@dataclass(kw_only=True)
class LinearConfig(EarlyConfig):
    """Inputs and training of `linear`."""

    inputs: Sequence[str] = ()
    """Inputs: `early` (the residual after early attention, through the target's norm), `quasi_hidden` (q_l),
    `router_input` (s_l), `routing` (combine weights as a row over experts), `previous` (the previous token's router
    logits at the target layer). Empty: all inputs in the traces; one of the first three if the hidden size is above
    1024."""
    strengths: Annotated[Sequence[Annotated[float, Field(gt=0)]], Field(min_length=1)] = (1e-4, 1e-3, 1e-2, 0.1, 1, 10)
    """Ridge strengths to choose from on validation, relative to each input's variance; the target's own router, which
    is an infinite strength, is always a candidate."""
    learning_rate: Annotated[float, Field(ge=1e-12, le=1e3)] = 3e-4
    """Peak learning rate of the distillation (AdamW, warm-up and cosine)."""
    weight_decay: Annotated[float, Field(ge=0, le=1e3)] = 0.01
    """Weight decay."""
    step_tokens: Count = 512
    """Tokens per optimiser step (each is one example per layer pair)."""
    steps: Annotated[int, Field(ge=0, le=10**9)] = 400
    """Maximum number of optimiser steps; 0 leaves the ridge regression alone."""
    passes: Count = 30
    """Maximum number of passes over the training tokens."""
    patience: Count = 4
    """Validation rounds without improvement before training stops; a full run has twelve rounds."""

    def __post_init__(self) -> None:
        EarlyConfig.__post_init__(self)
        self.inputs, self.strengths = list(self.inputs), list(self.strengths)
        named = [name for name in INPUTS if name in self.inputs]
        if self.inputs and (len(named) < len(self.inputs) or named[0] not in HIDDEN_INPUTS):
            raise ExpertcastError(
                f"inputs={self.inputs}: name one of {', '.join(HIDDEN_INPUTS)} at least, and any of "
                f"{', '.join(INPUTS)}, each once"
            )
        self.inputs = named  # features are concatenated in the order of INPUTS


class Linear(LooksEarly, QuasiInput):
    """Forecasts logits_{l+ahead} = x W + b in fp32, with x the concatenated inputs."""

    name: ClassVar[str] = "linear"
    config_class: ClassVar[type[PredictorConfig]] = LinearConfig
    config: LinearConfig

    def __init__(self, config: PredictorConfig, shape: ModelShape) -> None:
        assert isinstance(config, LinearConfig)
        super().__init__(config, shape)
        self.inputs = config.inputs or default_inputs(shape, ["early"])
        self.uses_previous_token, self.uses_early = "previous" in self.inputs, "early" in self.inputs
        self.reads_residual = self.uses_early or "quasi_hidden" in self.inputs
        self.reads_routing = self.reads_residual or "routing" in self.inputs
        self.held = StandIn(shape, config.stand_in_rank or 0) if self.uses_early else None
        if "quasi_hidden" not in self.inputs:
            del self.expert_LED, self.shared_LD
        if self.uses_previous_token:
            self.register_buffer("usual_LE", torch.zeros(shape.layers, shape.experts))
        self.sizes = [shape.hidden if name in HIDDEN_INPUTS else shape.experts for name in self.inputs]
        for ahead in config.ahead:
            pairs = max(shape.layers - ahead, 0)
            self.register_buffer(f"weight_PFE_{ahead}", torch.zeros(pairs, sum(self.sizes), shape.experts))
            self.register_buffer(f"bias_PE_{ahead}", torch.zeros(pairs, shape.experts))

    def map_of(self, ahead: int) -> tuple[Tensor, Tensor]:
        """Return W [P, F, E] and b [P, E] of one distance; changes in place count."""
        return self.get_buffer(f"weight_PFE_{ahead}"), self.get_buffer(f"bias_PE_{ahead}")

    def features(self, state: RouterState, ahead: int) -> Tensor:
        """Return x [T, F] in fp32."""
        parts = [self._input(name, state, ahead).float() for name in self.inputs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _input(self, name: str, state: RouterState, ahead: int) -> Tensor:
        if name == "early":
            return self.early_input(state, ahead)
        if name == "quasi_hidden":
            return QuasiInput.input_vector(self, state, ahead)
        if name == "router_input":
            return state.router_input_TD
        if name == "routing":
            weights_TK = state.topk_weights_TK.float()
            routing_TE = weights_TK.new_zeros(len(weights_TK), self.shape.experts)
            return routing_TE.scatter_(1, state.topk_ids_TK, weights_TK)
        return self._previous(state, state.layer + ahead)

    def _previous(self, state: RouterState, target: int) -> Tensor:
        """Return the previous token's centred logits [T, E] at the target layer; if unknown, their training mean."""
        usual_E = self.get_buffer("usual_LE")[target]
        if state.previous_logits_TLE is None:
            return usual_E.expand(len(state.residual_TD), -1)
        logits_TE = state.previous_logits_TLE[:, target].float()
        centred_TE = logits_TE - logits_TE.mean(dim=1, keepdim=True)
        return torch.where(centred_TE.isnan(), usual_E, centred_TE)

    def input_vector(self, state: RouterState, ahead: int) -> Tensor:
        """Return the input [T, D] that is closest to the target router's."""
        return self._input(self.inputs[0], state, ahead)

    def logits(self, state: RouterState, ahead: int) -> Tensor:
        """Return x W + b [T, E] in fp32."""
        weight_PFE, bias_PE = self.map_of(ahead)
        return torch.addmm(bias_PE[state.layer], self.features(state, ahead), weight_PFE[state.layer])

    def maps(self, layer: int, ahead: int) -> Maps | None:
        weight_PFE, bias_PE = self.map_of(ahead)
        return self._folded(weight_PFE[layer], bias_PE[layer], layer, ahead)

    def _folded(self, map_FX: Tensor, bias_X: Tensor, layer: int, ahead: int) -> Maps:
        """Return a map of the features by input; its bias has the centring of `previous` and its training mean."""
        parts, usual_E = zip(self.inputs, map_FX.split_with_sizes(self.sizes), strict=True), None
        # the target's own router reads the first input alone
        of = {name: map_VX for name, map_VX in parts if name == self.inputs[0] or map_VX.any()}
        if "previous" in of:
            usual_E = self.get_buffer("usual_LE")[layer + ahead]
            bias_X = bias_X + usual_E @ of["previous"]
            of["previous"] = of["previous"] - of["previous"].mean(dim=0)
        defaults = (self.expert_LED[layer], self.shared_LD[layer]) if "quasi_hidden" in of else None
        return Maps(of=of, bias_X=bias_X, usual_E=usual_E, defaults=defaults)

    def rungs(self) -> Mapping[str, Predictor]:
        """Return `quasi_hidden` with the same default vectors, if there are any, then the predictor itself."""
        if "quasi_hidden" not in self.inputs or len(self.inputs) == 1:
            return {self.name: self}
        cheap = QuasiHidden(PredictorConfig(ahead=self.ahead), self.shape)
        cheap.expert_LED, cheap.shared_LD = self.expert_LED, self.shared_LD
        return {cheap.name: cheap.bind(self.view), self.name: self}
