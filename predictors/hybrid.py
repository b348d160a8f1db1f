"""Per layer the best of several predictors: Hybrid-PF of Speculating Experts, over all predictors here.

T tokens, D hidden size, E routed experts. Who is chosen where, and which others are kept because they cost less, is
decided on validation by :mod:`expertcast.training.fit` and stands in the config, so a checkpoint's config.json can be
read for it.
"""

from __future__ import annotations

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
from expertcast.predictors.messages import ExpertcastError, Json
from expertcast.predictors.options import check_between, from_values
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
BEST, PAPER = "best", "paper"
RULES = (BEST, PAPER)
PAPER_CANDIDATES = ("quasi_hidden", "estimator")
LOW_RECALL = 0.8
SHARED = ("expert_LED", "shared_LD")
"""Default vectors."""
SHARED_PARTS = ("held.",)
"""The stand-in for early attention."""


class Choice(TypedDict):
    """Whom a hybrid has chosen for a target layer."""

    ahead: int
    layer: int
    predictor: str
    recall: dict[str, Annotated[float, Field(ge=0, le=1)]]


Choice.__pydantic_config__ = CLOSED  # type: ignore[attr-defined]


@dataclass(kw_only=True)
class HybridConfig(PredictorConfig):
    """Which predictors a hybrid chooses from, and whom it has chosen where."""

    candidates: Sequence[str] = CANDIDATES
    """Predictors to choose from."""
    threshold: float = 0.0
    """How much higher recall on validation a dearer predictor must have to be chosen over a cheaper one at a layer."""
    rule: str = BEST
    """best: at each layer the candidate with the highest recall; paper: the first of two (quasi_hidden, estimator), and
    the second only where the first one's recall is low."""
    low_recall: float = LOW_RECALL
    """With rule paper, the recall on validation below which a layer takes the second candidate; the paper says low and
    gives no number, this one is ours."""
    member_configs: dict[str, Json] = field(default_factory=dict)
    """By predictor: before training, the config to fit a candidate with; after it, that of each kept predictor."""
    cost_ms: dict[str, Annotated[float, Field(ge=0)]] = field(default_factory=dict)
    """By kept predictor, milliseconds of one forecast for one token, without the block that early attention runs:
    filled by training."""
    choices: Sequence[Choice] = ()
    """Per distance and target layer: `ahead`, `layer`, `predictor`, `recall` of every candidate; filled by training."""

    def __post_init__(self) -> None:
        PredictorConfig.__post_init__(self)
        if self.rule not in RULES:
            raise ExpertcastError(f"rule={self.rule!r}: choose from {', '.join(RULES)}")
        if self.rule == PAPER and tuple(self.candidates) == CANDIDATES:
            self.candidates = PAPER_CANDIDATES
        self.candidates, self.choices = list(self.candidates), list(self.choices)
        self._check_rule()
        if not self.candidates or "hybrid" in self.candidates:
            raise ExpertcastError(f"candidates={self.candidates}: name at least one predictor other than hybrid")
        for name in () if self.choices else self.candidates:
            if name not in names():
                raise ExpertcastError(f"candidates={self.candidates}: {name!r} is none of {', '.join(names())}")
        if self.threshold < 0:
            raise ExpertcastError(f"threshold={self.threshold}: give 0 or more")
        strangers = {choice["predictor"] for choice in self.choices} - set(self.candidates)
        if strangers:
            raise ExpertcastError(f"choices of {sorted(strangers)}, which are not among {self.candidates}")
        for what, values in (("member_configs", self.member_configs), ("cost_ms", self.cost_ms)):
            unknown = set(values) - set(self.candidates)
            if unknown:
                raise ExpertcastError(f"{what} for {sorted(unknown)}, which are not among {self.candidates}")

    def _check_rule(self) -> None:
        check_between(self, 0, 1, "low_recall")
        if self.rule == BEST and self.low_recall != LOW_RECALL:
            raise ExpertcastError(f"low_recall={self.low_recall} belongs to rule=paper: give that too, or leave it out")
        if self.rule == PAPER and self.threshold:
            raise ExpertcastError(f"threshold={self.threshold} belongs to rule=best: give low_recall for rule=paper")
        if self.rule == PAPER and len(self.candidates) != 2:
            raise ExpertcastError(
                f"candidates={self.candidates}: rule=paper takes two, the one that is used and the one that takes over "
                "where its recall is low"
            )


def member_recall(choices: Sequence[Choice]) -> dict[str, float]:
    """Mean recall@k on validation over the target layers at the shortest distance, by candidate; and the hybrid's own.

    Args:
        choices: as in :class:`HybridConfig`.
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
    """Hands each forecast to the member chosen for the target layer.

    It holds the chosen members, and the cheaper ones that `HybridConfig.cost_ms` names: these are rungs only. What
    members have in common (default vectors, the stand-in for early attention) is one tensor for all of them.
    """

    name: ClassVar[str] = "hybrid"
    config_class: ClassVar[type[PredictorConfig]] = HybridConfig
    config: HybridConfig

    def __init__(self, config: PredictorConfig, shape: ModelShape) -> None:
        assert isinstance(config, HybridConfig)
        super().__init__(config, shape)
        self.chosen = {(choice["ahead"], choice["layer"]): choice["predictor"] for choice in config.choices}
        targets = [(ahead, layer) for ahead in config.ahead for layer in range(ahead, shape.layers)]
        if config.choices and sorted((choice["ahead"], choice["layer"]) for choice in config.choices) != targets:
            raise ExpertcastError(f"choices are not one for each target layer of {shape.as_dict()}: train hybrid again")
        kept = {*self.chosen.values(), *config.cost_ms} if self.chosen else set()
        names = [name for name in config.candidates if name in kept]
        self.members = nn.ModuleDict({name: _member(name, config, shape) for name in names})
        self._share()
        self.uses_previous_token = any(self.member(name).uses_previous_token for name in names)
        self.uses_early = any(self.member(name).uses_early for name in names)
        self.reads_residual = any(self.member(name).reads_residual for name in names)
        self.reads_routing = any(self.member(name).reads_routing for name in names)
        self.traceable = all(self.member(name).traceable for name in names)

    def member(self, name: str) -> Predictor:
        """A kept member by its registry name."""
        module = self.members[name]
        assert isinstance(module, Predictor)
        return module

    def _share(self) -> None:
        """The first member's tensor stands for those of the same name; the state dict has it once."""
        first: dict[str, Tensor] = {}
        for name in self.members:
            for path, tensor in list(self.member(name).named_buffers()):
                if path in SHARED or path.startswith(SHARED_PARTS):
                    parent, _, key = path.rpartition(".")
                    own = first.setdefault(path, tensor)
                    if own is not tensor and own.shape == tensor.shape:
                        self.member(name).get_submodule(parent).register_buffer(key, own, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Hybrid:
        """Moved to another device, members have tensors of their own again."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._share()
        return self

    def bind(self, view: MoEView) -> Predictor:
        if not self.chosen:
            raise ExpertcastError("hybrid has chosen no predictors yet: train it with `expertcast train`")
        for name in self.members:
            self.member(name).bind(view)
        return super().bind(view)

    def rungs(self) -> Mapping[str, Predictor]:
        """Its members by rising cost, those that read early attention behind the others; last the hybrid, or the member
        that it has chosen for all layers."""
        cost, chosen = self.config.cost_ms, set(self.chosen.values())
        order = sorted(self.members, key=lambda name: (self.member(name).uses_early, cost.get(name, math.inf)))
        found = {name: self.member(name) for name in order}
        last = found.pop(chosen.pop()) if len(chosen) == 1 else self
        return {**found, last.name: last}

    def wants_early(self, layer: int, ahead: int) -> bool:
        """Whether the member chosen for a forecast made at `layer` reads early attention."""
        return self.member(self.chosen[ahead, layer + ahead]).uses_early

    def stand_in(self, state: RouterState) -> Tensor:
        """Of any member that has one: they were all trained on the same."""
        return next(self.member(name) for name in self.members if self.member(name).uses_early).stand_in(state)

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
    what = f"member_configs of {name}"
    member = from_values(cls.config_class, config.member_configs.get(name, {}), what, "train hybrid again")
    if not set(config.ahead) <= set(member.ahead):
        raise ExpertcastError(f"{what}: it looks {list(member.ahead)} layers ahead, hybrid {list(config.ahead)}")
    return cls(member, shape)
