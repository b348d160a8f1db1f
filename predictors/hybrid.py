"""Per layer the best of several predictors: Hybrid-PF of Speculating Experts (row B14), over all predictors here.

T tokens, D hidden size, E routed experts. Who is chosen where is decided on validation by
:mod:`expertcast.training.selection` and stands in the config, so a checkpoint's config.json can be read for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor, nn

from expertcast.predictors.base import Forecast, Predictor, PredictorConfig, RouterState
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.plain import Json
from expertcast.predictors.registry import names, predictor_class
from expertcast.predictors.view import ModelShape, MoEView

CANDIDATES = ("frequency", "previous_token", "router_input", "next_norm", "quasi_hidden", "linear", "estimator")


@dataclass(kw_only=True)
class HybridConfig(PredictorConfig):
    """Which predictors a hybrid chooses from, and whom it has chosen where."""

    candidates: Sequence[str] = CANDIDATES
    """Predictors to choose from."""
    threshold: float = 0.0
    """How much higher recall on validation a dearer predictor must have to be chosen over a cheaper one at a layer."""
    member_configs: dict[str, Json] = field(default_factory=dict)
    """By predictor: before training, the config to fit a candidate with; after it, that of each chosen predictor."""
    choices: Sequence[Json] = ()
    """Per distance and target layer: `ahead`, `layer`, `predictor`, `recall` of every candidate; filled by training."""

    def __post_init__(self) -> None:
        PredictorConfig.__post_init__(self)
        self.candidates, self.choices = list(self.candidates), list(self.choices)
        if not self.candidates or "hybrid" in self.candidates:
            raise ExpertcastError(f"candidates={self.candidates}: name at least one predictor other than hybrid")
        for name in () if self.choices else self.candidates:
            if name not in names():
                raise ExpertcastError(f"candidates={self.candidates}: {name!r} is none of {', '.join(names())}")
        if self.threshold < 0:
            raise ExpertcastError(f"threshold={self.threshold}: give 0 or more")
        unknown = set(self.member_configs) - set(self.candidates)
        if unknown:
            raise ExpertcastError(f"member_configs for {sorted(unknown)}, which are not among {self.candidates}")


class Hybrid(Predictor):
    """Hands each forecast to the member chosen for the target layer; holds the chosen members only."""

    name: ClassVar[str] = "hybrid"
    config_class: ClassVar[type[PredictorConfig]] = HybridConfig
    config: HybridConfig

    def __init__(self, config: PredictorConfig, shape: ModelShape) -> None:
        assert isinstance(config, HybridConfig)
        super().__init__(config, shape)
        self.chosen = {(int(c["ahead"]), int(c["layer"])): str(c["predictor"]) for c in config.choices}
        names = [name for name in config.candidates if name in self.chosen.values()]
        self.members = nn.ModuleDict({name: _member(name, config, shape) for name in names})
        self.uses_previous_token = any(self.member(name).uses_previous_token for name in names)
        self.traceable = all(self.member(name).traceable for name in names)

    def member(self, name: str) -> Predictor:
        """A chosen member by its registry name."""
        module = self.members[name]
        assert isinstance(module, Predictor)
        return module

    def bind(self, view: MoEView) -> Predictor:
        for name in self.members:
            self.member(name).bind(view)
        return super().bind(view)

    def logits(self, state: RouterState, ahead: int) -> Tensor:
        """The chosen member's logits [T, E]."""
        return self._chosen(state, ahead).logits(state, ahead)

    def input_vector(self, state: RouterState, ahead: int) -> Tensor | None:
        """The chosen member's input vector [T, D], if it has one."""
        return self._chosen(state, ahead).input_vector(state, ahead)

    def _forecast(self, state: RouterState, target: int, ahead: int) -> Forecast:
        return self._chosen(state, ahead)._forecast(state, target, ahead)

    def _chosen(self, state: RouterState, ahead: int) -> Predictor:
        return self.member(self.chosen[ahead, state.layer + ahead])


def _member(name: str, config: HybridConfig, shape: ModelShape) -> Predictor:
    cls = predictor_class(name)
    values: Json = {"ahead": config.ahead} | config.member_configs.get(name, {})
    return cls(cls.config_class(**values), shape)
