"""Hybrid: the best of several predictors for each layer (Hybrid-PF of Madan et al., Speculating Experts, 2026).

T tokens, D hidden size, E routed experts. :mod:`expertcast.training.fit` chooses on validation and records the choices
in the config, so they are readable in a checkpoint's config.json.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor, nn
from typing_extensions import TypedDict

from expertcast.predictors.artefacts import CLOSED
from expertcast.predictors.base import Forecast, Predictor, PredictorConfig, RouterState, names, predictor_class
from expertcast.predictors.folded import Maps
from expertcast.predictors.messages import ExpertcastError, Json
from expertcast.predictors.options import from_values
from expertcast.predictors.view import ModelShape, MoEView

CANDIDATES = (
    "frequency",
    "previous_token",
    "router_input",
    "next_norm",
    "quasi_hidden",
    "linear",
    "early_attention",
    "estimator",
)
SUFFICIENT = 0.9
"""Recall on validation from which a cheaper member's forecast is executed at a layer."""
SHARED = ("expert_LED", "shared_LD", "held.")
"""Beginnings of the paths of buffers that members share: default vectors, and the stand-in of early attention."""


UNTRAINED = "predictor {!r} must be trained for a model: give the folder that `expertcast train` wrote"


class Choice(TypedDict):
    """Predictor chosen for a target layer, with the recall@k on validation of every candidate."""

    ahead: int
    layer: int
    predictor: str
    recall: dict[str, Annotated[float, Field(ge=0, le=1)]]


Choice.__pydantic_config__ = CLOSED  # type: ignore[attr-defined]


@dataclass(kw_only=True)
class HybridConfig(PredictorConfig):
    """Candidates, selection rule, and the choices of training."""

    candidates: Sequence[str] = CANDIDATES
    """Predictors to choose from."""
    threshold: Annotated[float, Field(ge=0)] = 0.0
    """Minimum gain in validation recall for which a costlier predictor replaces a cheaper one at a layer."""
    member_configs: dict[str, Json] = field(default_factory=dict)
    """Configs by predictor. Before training: the candidates'. Afterwards: those of the members."""
    cost_ms: dict[str, Annotated[float, Field(ge=0)]] = field(default_factory=dict)
    """Milliseconds of one forecast for one token by kept predictor, without the block of early attention; set by
    training."""
    choices: Sequence[Choice] = ()
    """`ahead`, `layer`, `predictor` and every candidate's `recall` for each distance and target layer; set by
    training."""

    def __post_init__(self) -> None:
        PredictorConfig.__post_init__(self)
        self.candidates, self.choices = list(self.candidates), list(self.choices)
        if not self.candidates or "hybrid" in self.candidates:
            raise ExpertcastError(f"candidates={self.candidates}: list at least one predictor other than hybrid")
        for name in () if self.choices else self.candidates:
            if name not in names():
                raise ExpertcastError(f"candidates: unknown predictor {name!r}, choose from {', '.join(names())}")
        strangers = {choice["predictor"] for choice in self.choices} - set(self.candidates)
        if strangers:
            raise ExpertcastError(f"choices name {sorted(strangers)}, which are not candidates: {self.candidates}")
        for what, values in (("member_configs", self.member_configs), ("cost_ms", self.cost_ms)):
            unknown = set(values) - set(self.candidates)
            if unknown:
                raise ExpertcastError(f"{what} names {sorted(unknown)}, which are not candidates: {self.candidates}")


def member_recall(choices: Sequence[Choice]) -> dict[str, float]:
    """Return the mean recall@k on validation over target layers, by candidate and for the hybrid itself.

    Args:
        choices: `HybridConfig.choices`; only the shortest distance counts.
    """
    nearest = min((choice["ahead"] for choice in choices), default=0)
    found: dict[str, list[float]] = {}
    for choice in choices:
        if choice["ahead"] == nearest:
            own = (
                {Hybrid.name: choice["recall"][choice["predictor"]]} if choice["predictor"] in choice["recall"] else {}
            )
            for name, value in (choice["recall"] | own).items():
                found.setdefault(name, []).append(value)
    return {name: statistics.fmean(values) for name, values in found.items()}


class Hybrid(Predictor):
    """Delegates each forecast to the member chosen for the target layer.

    It contains the chosen members, and cheaper ones (`HybridConfig.cost_ms`) that serve only as rungs. Members share
    their default vectors and the stand-in of early attention.
    """

    name: ClassVar[str] = "hybrid"
    config_class: ClassVar[type[PredictorConfig]] = HybridConfig
    config: HybridConfig

    def __init__(self, config: PredictorConfig, shape: ModelShape) -> None:
        assert isinstance(config, HybridConfig)
        super().__init__(config, shape)
        if not config.choices:
            raise ExpertcastError(UNTRAINED.format(self.name))
        self.chosen = {(choice["ahead"], choice["layer"]): choice["predictor"] for choice in config.choices}
        targets = [(ahead, layer) for ahead in config.ahead for layer in range(ahead, shape.layers)]
        if sorted((choice["ahead"], choice["layer"]) for choice in config.choices) != targets:
            raise ExpertcastError(f"choices are not one for each target layer of {shape.as_dict()}: train hybrid again")
        kept = {*self.chosen.values(), *config.cost_ms}
        names = [name for name in config.candidates if name in kept]
        self.members = nn.ModuleDict({name: _member(name, config, shape) for name in names})
        self._share()
        members = [self.member(name) for name in names]
        for flag in ("uses_previous_token", "uses_early", "reads_residual", "reads_routing"):
            setattr(self, flag, any(getattr(member, flag) for member in members))
        self.traceable = all(member.traceable for member in members)

    def member(self, name: str) -> Predictor:
        """Return a member by its registry name."""
        module = self.members[name]
        assert isinstance(module, Predictor)
        return module

    def _share(self) -> None:
        """Make members share equal tensors with the first member; the state dict then has them once."""
        first: dict[str, Tensor] = {}
        for name in self.members:
            for path, tensor in list(self.member(name).named_buffers()):
                if path.startswith(SHARED):
                    parent, _, key = path.rpartition(".")
                    own = first.setdefault(path, tensor)
                    if own is not tensor and own.shape == tensor.shape:
                        self.member(name).get_submodule(parent).register_buffer(key, own, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Hybrid:
        """Move the members, then share their tensors again."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._share()
        return self

    def bind(self, view: MoEView) -> Predictor:
        for name in self.members:
            self.member(name).bind(view)
        return super().bind(view)

    def rungs(self) -> Mapping[str, Predictor]:
        """Return the members by rising cost, those that read early attention last, then the hybrid itself.

        If one member is chosen for all layers, it replaces the hybrid.
        """
        found, chosen = {name: self.member(name) for name in self._by_cost()}, set(self.chosen.values())
        last = found.pop(chosen.pop()) if len(chosen) == 1 else self
        return {**found, last.name: last}

    def executed(self) -> Predictor:
        """Return a hybrid of the same members that uses the cheapest one of `SUFFICIENT` recall at each layer, and the
        best one where none has it."""
        cheap, order = copy.copy(self), self._by_cost()
        cheap.chosen = {
            (choice["ahead"], choice["layer"]): next(
                (name for name in order if choice["recall"].get(name, 0.0) >= SUFFICIENT), choice["predictor"]
            )
            for choice in self.config.choices
        }
        return cheap

    def _by_cost(self) -> list[str]:
        """Return the members' names by rising cost, those that read early attention last."""
        cost = self.config.cost_ms
        return sorted(self.members, key=lambda name: (self.member(name).uses_early, cost.get(name, math.inf)))

    def wants_early(self, layer: int, ahead: int) -> bool:
        """Return whether the member chosen for layer + `ahead` reads early attention."""
        return self.member(self.chosen[ahead, layer + ahead]).uses_early

    def stand_in(self, state: RouterState) -> Tensor:
        """Return the stand-in of a member that has one; all members were trained with the same one."""
        return next(self.member(name) for name in self.members if self.member(name).uses_early).stand_in(state)

    def maps(self, layer: int, ahead: int) -> Maps | None:
        """Return the maps of the member chosen for layer + `ahead`."""
        return self.member(self.chosen[ahead, layer + ahead]).maps(layer, ahead)

    def logits(self, state: RouterState, ahead: int) -> Tensor:
        """Return the chosen member's logits [T, E]."""
        return self._chosen(state, ahead).logits(state, ahead)

    def input_vector(self, state: RouterState, ahead: int) -> Tensor | None:
        """Return the chosen member's input vector [T, D], if it has one."""
        return self._chosen(state, ahead).input_vector(state, ahead)

    def _forecast(self, state: RouterState, target: int, ahead: int) -> Forecast:
        return self._chosen(state, ahead).forecast(state, ahead)

    def _chosen(self, state: RouterState, ahead: int) -> Predictor:
        return self.member(self.chosen[ahead, state.layer + ahead])


def _member(name: str, config: HybridConfig, shape: ModelShape) -> Predictor:
    cls = predictor_class(name)
    what = f"member_configs of {name}"
    member = from_values(cls.config_class, config.member_configs.get(name, {}), what, "train hybrid again")
    if not set(config.ahead) <= set(member.ahead):
        raise ExpertcastError(f"{what}: distances {list(member.ahead)} do not include hybrid's {list(config.ahead)}")
    return cls(member, shape)
