"""What a predictor is: router state in, forecast of a later layer's routing out.

T tokens, D hidden size, L MoE layers, E routed experts per layer, K experts per token.
The base class owns the flow (which layer, whose routing rule); a predictor only gives logits.
"""

from __future__ import annotations

import math
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from expertcast.predictors.messages import ExpertcastError, Json
from expertcast.predictors.options import check_finite, written
from expertcast.predictors.view import ModelShape, MoEView

if TYPE_CHECKING:
    from expertcast.predictors.folded import Maps

# Probabilities from forecast logits: calibrated, or as the logits stand

FARTHEST = 12.0
"""Margins are cut here: what lies farther from the boundary is as good as certain, and one outlier must not outweigh
all other tokens where slopes are learnt."""
_NEWTON_STEPS = 40
_NEWTON_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class LogOdds:
    """A calibrated reading of one layer pair's logits: log-odds = slope x m + root x sign(m) sqrt|m| + offset.

    The margin m is how far an expert's logit lies above the boundary, halfway between the token's K-th and K+1-th
    logit; the slope is one over the temperature, and the root lets the odds rise fast near the boundary and slowly far
    from it, as forecasts with a few large errors need. Fitted on validation by the least cross-entropy, so that the
    probabilities sum to K in the mean, though not for every token: the distance to the boundary tells more than the
    place in a sum. (Bundled model, error over likely pairs of the test split with a temperature and an offset alone
    .008 to .019, with the root .007 to .014.)
    """

    slope: float
    root: float
    offset: float

    def of(self, logits_TE: Tensor, top_k: int) -> Tensor:
        """Log-odds [T, E], fp32."""
        margin_TE = margin(logits_TE, top_k)
        return self.slope * margin_TE + self.root * signed_root(margin_TE) + self.offset


def margin(logits_TE: Tensor, top_k: int) -> Tensor:
    """How far each logit lies above its token's boundary [T, E], fp32, cut at 12 on both sides."""
    logits_TE = logits_TE.float()
    if top_k >= logits_TE.shape[1]:
        return torch.full_like(logits_TE, FARTHEST)
    boundary_T1 = logits_TE.topk(top_k + 1, dim=1).values[:, -2:].mean(dim=1, keepdim=True)
    return (logits_TE - boundary_T1).clamp(-FARTHEST, FARTHEST)


def signed_root(margin_TE: Tensor) -> Tensor:
    """sign(m) sqrt|m|."""
    return margin_TE.sign() * margin_TE.abs().sqrt()


def inclusion_probability(logits_TE: Tensor, top_k: int, start_T: Tensor | None = None) -> Tensor:
    """Probability [T, E] that each expert is among the token's K, read from forecast logits.

    p = sigmoid(z - tau), with one tau per token such that the probabilities sum to K. It is the maximiser of
    <z, p> + sum of the binary entropies of p over all p in [0, 1]^E that sum to K: what softmax is to the best
    one of E, this is to the best K. Unlike K * softmax clipped at 1 it always sums to K. It ignores whatever
    else a router chooses by (correction bias, groups), which the logits do not hold.

    tau is found by Newton's method on log(sum of p) = log K, which is nearly straight where the logits are flat
    and most of the p small, kept inside a bracket that bisection shrinks.

    Args:
        start_T: a first tau, best halfway between the K-th and the K+1-th logit; found by sorting if not given.
    """
    logits_TE = logits_TE.float()
    experts = logits_TE.shape[1]
    if top_k >= experts:
        return torch.ones_like(logits_TE)
    tau_T1 = logits_TE.topk(top_k + 1, dim=1).values[:, -2:].mean(dim=1) if start_T is None else start_T.float()
    tau_T1 = tau_T1[:, None]
    margin = math.log(top_k / (experts - top_k))  # at tau = z - margin, sigmoid(z - tau) = K / E
    low_T1, high_T1 = logits_TE.amin(dim=1, keepdim=True) - margin, logits_TE.amax(dim=1, keepdim=True) - margin
    for _ in range(_NEWTON_STEPS):
        p_TE = torch.sigmoid(logits_TE - tau_T1)
        sum_T1 = p_TE.sum(dim=1, keepdim=True)
        excess_T1 = sum_T1 - top_k
        open_T1 = excess_T1.abs() > _NEWTON_TOLERANCE
        if not open_T1.any():
            return p_TE
        low_T1 = torch.where(excess_T1 > 0, tau_T1, low_T1)
        high_T1 = torch.where(excess_T1 < 0, tau_T1, high_T1)
        # sum of p (1 - p) = sum of p - sum of p^2: one pass less over [T, E]
        slope_T1 = sum_T1 - torch.linalg.vecdot(p_TE, p_TE)[:, None]
        newton_T1 = tau_T1 + (sum_T1 / top_k).log() * sum_T1 / slope_T1.clamp_min(1e-12)
        inside_T1 = (newton_T1 > low_T1) & (newton_T1 < high_T1)
        # rows that are done stay: rounding would send them out of their closed bracket and away by bisection
        tau_T1 = torch.where(open_T1, torch.where(inside_T1, newton_T1, (low_T1 + high_T1) / 2), tau_T1)
    return torch.sigmoid(logits_TE - tau_T1)


MOST_LAYERS = 10_000
MOST_DISTANCES = 64


@dataclass(slots=True, kw_only=True)
class RouterState:
    """What is known at MoE layer `layer` when its router has run."""

    layer: int
    residual_TD: Tensor
    """r_l: input of the norm before the router."""
    router_input_TD: Tensor
    """s_l = LN_l(r_l): what router l reads."""
    logits_TE: Tensor
    topk_ids_TK: Tensor
    topk_weights_TK: Tensor
    previous_logits_TLE: Tensor | None = None
    """Router logits of the previous token of the same text, all layers; NaN rows where there is none.
    None when nothing is known of earlier tokens (prefill)."""
    early_TD: Tensor | None = None
    """What the residual r_{l+1} becomes when block l+1 runs its attention on :meth:`Predictor.stand_in` (early
    attention); the stand-in itself where that cannot be run. None when nobody asked for it."""


@dataclass(slots=True, kw_only=True)
class Forecast:
    """Predicted routing of layer `layer`; ids and weights follow that layer's own routing rule."""

    layer: int
    logits_TE: Tensor
    topk_ids_TK: Tensor
    topk_weights_TK: Tensor
    log_odds: LogOdds | None = None
    """How the logits are read as probabilities; None where the predictor is not calibrated."""

    def probability(self) -> Tensor:
        """[T, E] that each expert is among the token's K, fp32; worked out anew at every call."""
        top_k = self.topk_ids_TK.shape[1]
        if self.log_odds is None:
            return inclusion_probability(self.logits_TE, top_k)
        return self.log_odds.of(self.logits_TE, top_k).sigmoid()

    def __getitem__(self, rows: slice | Tensor) -> Forecast:
        """The forecast for some of its tokens."""
        return Forecast(
            layer=self.layer,
            logits_TE=self.logits_TE[rows],
            topk_ids_TK=self.topk_ids_TK[rows],
            topk_weights_TK=self.topk_weights_TK[rows],
            log_odds=self.log_odds,
        )

    @staticmethod
    def join(parts: Sequence[Forecast]) -> Forecast:
        """One forecast for the tokens of all parts, in their order; the parts are of one layer and predictor."""
        return Forecast(
            layer=parts[0].layer,
            logits_TE=torch.cat([part.logits_TE for part in parts]),
            topk_ids_TK=torch.cat([part.topk_ids_TK for part in parts]),
            topk_weights_TK=torch.cat([part.topk_weights_TK for part in parts]),
            log_odds=parts[0].log_odds,
        )


@dataclass(kw_only=True)
class PredictorConfig:
    """Base of every predictor's configuration; subclasses add fields with a docstring line each."""

    ahead: tuple[int, ...] = (1,)
    """How many layers ahead it can look: each value is fitted on its own."""

    def __post_init__(self) -> None:
        check_finite(self)
        self.ahead = tuple(sorted({int(value) for value in self.ahead}))
        if not 1 <= len(self.ahead) <= MOST_DISTANCES or not 1 <= self.ahead[0] <= self.ahead[-1] <= MOST_LAYERS:
            raise ExpertcastError(
                f"ahead={written(self.ahead)[:60]}: give layer distances of 1 or more, such as (1, 2), "
                f"at most {MOST_DISTANCES} of them"
            )

    def as_dict(self) -> Json:
        """The fields as they stand in a checkpoint's config.json."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


class Predictor(nn.Module, ABC):
    """Forecasts the routing of layer l + ahead from the router state at layer l.

    Subclasses set `name`, `config_class`, register their tensors as buffers or parameters (they are the
    checkpoint's state dict) and implement :meth:`logits`. The model's own norms and routers come in through
    :meth:`bind` and are never part of the state dict.
    """

    name: ClassVar[str]
    looks: ClassVar[str] = "layers"
    """What it looks ahead by: `layers`, or `tokens` (then :meth:`forecast` refuses)."""
    config_class: ClassVar[type[PredictorConfig]] = PredictorConfig
    uses_previous_token: bool = False
    """Whether `RouterState.previous_logits_TLE` must be filled for it."""
    uses_early: bool = False
    """Whether `RouterState.early_TD` must be filled for it."""
    reads_residual: bool = True
    """Whether a forecast reads `RouterState.residual_TD`: False lets it be made where only router inputs are known."""
    reads_routing: bool = True
    """Whether a forecast depends on the logits, ids or weights of its state: if not, chained forecasts are the same."""
    traceable: bool = False
    """True promises that a forecast is the same sequence of tensor operations in every decode step (no state kept in
    Python, no branch on values): the runtime may then run a trace of it, which is faster."""

    def __init__(self, config: PredictorConfig, shape: ModelShape) -> None:
        super().__init__()
        self.config = config
        self.shape = shape
        self.calibration: dict[int, Sequence[LogOdds]] = {}
        """By distance, how each layer pair's logits are read as probabilities; a distance that was not calibrated is
        missing."""
        self.learned_from: frozenset[str] | None = None
        """Hashes of the documents that it was fitted or chosen on (`Document.hash`); None where they are not known."""
        self._view: list[MoEView] = []  # in a list: nn.Module must not adopt the model's modules

    @property
    def ahead(self) -> tuple[int, ...]:
        """How many layers ahead it can look, rising."""
        return self.config.ahead

    @property
    def view(self) -> MoEView:
        """The model it is bound to."""
        assert self._view, f"{self.name}: bind(view) first"
        return self._view[0]

    def bind(self, view: MoEView) -> Predictor:
        """Give the predictor the model's norms and routers. Returns self.

        Raises:
            ExpertcastError: the model's L, E, K or D are not the predictor's.
        """
        if view.shape != self.shape:
            raise ExpertcastError(
                f"predictor {self.name} was made for {self.shape.as_dict()}, the model has "
                f"{view.shape.as_dict()}: train one for this model with `expertcast train`"
            )
        self._view[:] = [view]
        return self

    def check_ahead(self, ahead: int) -> None:
        """Refuse a distance that the predictor was not made for.

        Raises:
            ExpertcastError: `ahead` is not one of `self.ahead`.
        """
        if ahead not in self.ahead:
            raise ExpertcastError(
                f"predictor {self.name} looks {list(self.ahead)} layers ahead, not {ahead}: give one of these as ahead"
            )

    @torch.no_grad()
    def forecast(self, state: RouterState, ahead: int = 1) -> Forecast:
        """Forecast the routing of layer `state.layer + ahead`.

        Raises:
            ExpertcastError: `ahead` is not one of `self.ahead`, or the layer does not exist.
        """
        self.check_ahead(ahead)
        target = state.layer + ahead
        if target >= self.shape.layers:
            raise ExpertcastError(f"layer {target} does not exist: the model has MoE layers 0..{self.shape.layers - 1}")
        made = self._forecast(state, target, ahead)
        made.log_odds = self.log_odds(state.layer, ahead)
        return made

    def log_odds(self, layer: int, ahead: int) -> LogOdds | None:
        """How forecasts made at `layer` for layer `layer + ahead` are read as probabilities."""
        pairs = self.calibration.get(ahead)
        return None if pairs is None else pairs[layer]

    def _forecast(self, state: RouterState, target: int, ahead: int) -> Forecast:
        logits_TE = self.logits(state, ahead)
        ids_TK, weights_TK = self.view[target].route(logits_TE)
        return Forecast(layer=target, logits_TE=logits_TE, topk_ids_TK=ids_TK, topk_weights_TK=weights_TK)

    @abstractmethod
    def logits(self, state: RouterState, ahead: int) -> Tensor:
        """Forecast logits [T, E] for layer `state.layer + ahead`; the bounds are already checked."""

    def maps(self, layer: int, ahead: int) -> Maps | None:
        """The forecast that is made at `layer` for layer + `ahead` as maps of its inputs, for hints; None: it has no
        such form."""
        return None

    def rungs(self) -> Mapping[str, Predictor]:
        """Ways to forecast that it contains, by name, bound as it is; the last is the predictor itself.

        They share its tensors, and are cheaper and less sure than it: a run takes the one that saves most time.
        """
        return {self.name: self}

    def wants_early(self, layer: int, ahead: int) -> bool:
        """Whether a forecast made at `layer` for layer + `ahead` reads `RouterState.early_TD`."""
        return self.uses_early

    def stand_in(self, state: RouterState) -> Tensor:
        """What stands for the output [T, D] of layer `state.layer`'s block, on which early attention runs.

        Raises:
            NotImplementedError: `uses_early` is False.
        """
        raise NotImplementedError(f"{self.name} has no early attention")

    def input_vector(self, state: RouterState, ahead: int) -> Tensor | None:
        """The [T, D] vector that stands for s_{l+ahead} in this predictor, or None: scored by its cosine."""
        return None


# Registries; all registrations stand in the `__init__.py` of their folder


class Registered(Protocol):
    """What has a name, and a dataclass that configures it."""

    name: ClassVar[str]


R = TypeVar("R", bound=Registered)


class Registry(Generic[R]):
    """Classes of one kind by name, in order of registration."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._classes: dict[str, type[R]] = {}

    def register(self, cls: type[R]) -> type[R]:
        """Take a class under its `name`; returns it.

        Raises:
            ExpertcastError: the name is taken by another class.
        """
        if self._classes.setdefault(cls.name, cls) is not cls:
            raise ExpertcastError(
                f"{self.kind} {cls.name!r} is taken by {self._classes[cls.name].__name__}: choose another name"
            )
        return cls

    def get(self, name: str) -> type[R]:
        """The class of a name.

        Raises:
            ExpertcastError: unknown name; the message lists the known ones.
        """
        if name not in self._classes:
            raise ExpertcastError(f"unknown {self.kind} {reprlib.repr(name)}: {self.allowed()}")
        return self._classes[name]

    def classes(self) -> list[type[R]]:
        """All classes, in order of registration."""
        return list(self._classes.values())

    def names(self) -> list[str]:
        """All names, in order of registration."""
        return list(self._classes)

    def allowed(self) -> str:
        """The names, as the remedy in a message."""
        return f"choose from {', '.join(self._classes)}"


PREDICTORS: Registry[Predictor] = Registry("predictor")
register = PREDICTORS.register
predictor_class = PREDICTORS.get


def names(looks: str = "layers") -> list[str]:
    """Registered names of the predictors that look ahead by `layers` or by `tokens`, in order of registration."""
    return [cls.name for cls in PREDICTORS.classes() if cls.looks == looks]
