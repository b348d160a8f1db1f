"""Base class of predictors, their input (:class:`RouterState`) and output (:class:`Forecast`), and the registry.

T tokens, D hidden size, L MoE layers, E routed experts per layer, K experts per token.
The base class checks the distance and applies the target layer's routing rule; a subclass only computes logits.
"""

from __future__ import annotations

import math
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from expertcast.predictors.messages import ExpertcastError, Json, first_line
from expertcast.predictors.options import validate, written
from expertcast.predictors.view import ModelShape, MoEView

if TYPE_CHECKING:
    from expertcast.predictors.folded import Maps

# Probabilities from forecast logits, with or without calibration

FARTHEST = 12.0
"""Margins are clipped here. An expert farther from the boundary is almost certainly in or out, and an outlier must not
dominate the fit of the slope."""
_NEWTON_STEPS = 40
_NEWTON_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class LogOdds:
    """Calibration of one layer pair: log-odds = slope x m + bend x sign(m) ln(1 + |m| / unit) + offset.

    The margin m is the distance of an expert's logit from the boundary, the midpoint between the token's K-th and
    (K+1)-th largest logit. The slope is an inverse temperature. The logarithm lets the odds rise fast near the
    boundary and slowly far from it, which suits forecasts with a few large errors. The four numbers minimise
    cross-entropy on text not learned from (:mod:`expertcast.training.calibrate`), so the probabilities sum to K on
    average, but not for every token.
    """

    slope: float
    bend: float
    offset: float
    unit: float

    def of(self, logits_TE: Tensor, top_k: int) -> Tensor:
        """Return the log-odds [T, E] (fp32) that each expert is among the token's K, from forecast logits [T, E]."""
        margin_TE = margin(logits_TE, top_k)
        return self.slope * margin_TE + self.bend * signed_log(margin_TE / self.unit) + self.offset


def margin(logits_TE: Tensor, top_k: int) -> Tensor:
    """Return the margin [T, E] of each logit (fp32): its distance from the token's boundary, clipped to +-12."""
    logits_TE = logits_TE.float()
    if top_k >= logits_TE.shape[1]:
        return torch.full_like(logits_TE, FARTHEST)
    return (logits_TE - boundary(logits_TE, top_k)).clamp(-FARTHEST, FARTHEST)


def boundary(logits_TE: Tensor, top_k: int) -> Tensor:
    """Return the midpoint [..., 1] between the K-th and the (K+1)-th largest of logits [..., E]; K is less than E."""
    return logits_TE.topk(top_k + 1).values[..., -2:].mean(dim=-1, keepdim=True)


def signed_log(margin_TE: Tensor) -> Tensor:
    """Return sign(m) ln(1 + |m|) of margins [T, E]."""
    return margin_TE.sign() * margin_TE.abs().log1p()


def inclusion_probability(logits_TE: Tensor, top_k: int) -> Tensor:
    """Return the probability [T, E] that each expert is among the token's K, from uncalibrated logits.

    p = sigmoid(z - tau), with one tau per token such that the probabilities sum to K. This p maximises
    <z, p> + sum of the binary entropies of p over all p in [0, 1]^E that sum to K: it generalises softmax from the best
    expert to the best K. Unlike K * softmax clipped at 1, p always sums to K. Correction biases and expert groups of a
    router do not appear in logits and are ignored.

    tau solves log(sum of p) = log K by Newton's method. The function is almost linear when most of the p are small. A
    bracket with bisection guarantees convergence.

    Args:
        logits_TE: logits [T, E] of any float dtype.
        top_k: K.
    """
    logits_TE = logits_TE.float()
    experts = logits_TE.shape[1]
    if top_k >= experts:
        return torch.ones_like(logits_TE)
    tau_T1 = boundary(logits_TE, top_k)
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
        # rows that have converged keep their tau: rounding would push it out of the closed bracket
        tau_T1 = torch.where(open_T1, torch.where(inside_T1, newton_T1, (low_T1 + high_T1) / 2), tau_T1)
    return torch.sigmoid(logits_TE - tau_T1)


MOST_LAYERS = 10_000
MOST_DISTANCES = 64


@dataclass(slots=True, kw_only=True)
class RouterState:
    """State of T tokens at MoE layer `layer` right after its router has run: the input of a forecast."""

    layer: int
    residual_TD: Tensor
    """[T, D], r_l: residual stream after attention, the input of the norm before the router."""
    router_input_TD: Tensor
    """[T, D], s_l = LN_l(r_l): input of router l."""
    logits_TE: Tensor
    topk_ids_TK: Tensor
    topk_weights_TK: Tensor
    previous_logits_TLE: Tensor | None = None
    """Router logits [T, L, E] of the previous token of the same sequence; NaN rows for tokens without one.
    None if earlier tokens are unknown (prefill)."""
    early_TD: Tensor | None = None
    """[T, D], approximate r_{l+1}: block l+1 runs its attention on :meth:`Predictor.stand_in` instead of its true input
    (early attention). If attention cannot run early, the stand-in itself. None if no predictor reads it."""


@dataclass(slots=True, kw_only=True)
class Forecast:
    """Predicted routing of T tokens at layer `layer`; ids and weights follow that layer's own routing rule."""

    layer: int
    logits_TE: Tensor
    topk_ids_TK: Tensor
    topk_weights_TK: Tensor
    log_odds: LogOdds | None = None
    """Calibration of the logits; None if the predictor is not calibrated."""

    def __getitem__(self, rows: slice | Tensor) -> Forecast:
        """Return the forecast of a subset of the tokens."""
        return Forecast._joined([self], lambda parts: parts[0][rows])

    @staticmethod
    def join(parts: Sequence[Forecast]) -> Forecast:
        """Concatenate forecasts of one layer by one predictor along the tokens."""
        return Forecast._joined(parts, torch.cat)

    @staticmethod
    def _joined(parts: Sequence[Forecast], join: Callable[[list[Tensor]], Tensor]) -> Forecast:
        names = ("logits_TE", "topk_ids_TK", "topk_weights_TK")
        joined: Json = {name: join([getattr(part, name) for part in parts]) for name in names}
        return replace(parts[0], **joined)


@dataclass(kw_only=True)
class PredictorConfig:
    """Base of every predictor's configuration; subclasses add fields, each with a docstring."""

    ahead: tuple[int, ...] = (1,)
    """Layer distances to forecast; each is fitted separately."""

    def __post_init__(self) -> None:
        validate(self)
        self.ahead = tuple(sorted(set(self.ahead)))
        if not 1 <= len(self.ahead) <= MOST_DISTANCES or not 1 <= self.ahead[0] <= self.ahead[-1] <= MOST_LAYERS:
            raise ExpertcastError(
                f"ahead={written(self.ahead)[:60]}: give layer distances of 1 or more, such as (1, 2), "
                f"at most {MOST_DISTANCES} of them"
            )

    def check_ahead(self, ahead: int, name: str) -> None:
        """Raise :class:`ExpertcastError` if `ahead` is not one of `self.ahead`; `name`: of the predictor."""
        if ahead not in self.ahead:
            raise ExpertcastError(
                f"predictor {name} forecasts {list(self.ahead)} layers ahead, not {ahead}: use one of these"
            )

    def as_dict(self) -> Json:
        """Return the fields as JSON values, as a checkpoint's config.json stores them."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


class Predictor(nn.Module, ABC):
    """Base class of predictors: forecast the routing of layer l + ahead from the router state at layer l.

    A subclass sets `name`, optionally `config_class`, registers its tensors as buffers or parameters (they form the
    checkpoint's state dict) and implements :meth:`logits`. The model's norms and routers are available as `self.view`
    after :meth:`bind` and are never part of the state dict. `register` makes the class available by name.

    Args:
        config: instance of `config_class`.
        shape: L, E, K and D of the model.

    Example:
        >>> import expertcast
        >>> @expertcast.register
        ... class LastLayer(expertcast.Predictor):
        ...     name = "last_layer"
        ...
        ...     def logits(self, state, ahead):
        ...         return state.logits_TE  # assume that the routing does not change
        >>> traces = expertcast.TraceDataset.open("traces")
        >>> LastLayer(LastLayer.config_class(), traces.view.shape).bind(traces.view)
        LastLayer(layers=12, experts=64, top_k=4, hidden=192, ahead=[1])
    """

    name: ClassVar[str]
    config_class: ClassVar[type[PredictorConfig]] = PredictorConfig
    uses_previous_token: bool = False
    """Whether forecasts read `RouterState.previous_logits_TLE`."""
    uses_early: bool = False
    """Whether forecasts read `RouterState.early_TD`."""
    reads_residual: bool = True
    """Whether forecasts read `RouterState.residual_TD`; False allows forecasts when only router inputs are known."""
    reads_routing: bool = True
    """Whether a forecast depends on the logits, ids or weights of its state; if not, chained forecasts are equal."""
    traceable: bool = False
    """True promises that a forecast runs the same sequence of tensor operations in every decode step: no state in
    Python, no branch on values. The runtime may then record the operations and replay them, which is faster."""

    def __init__(self, config: PredictorConfig, shape: ModelShape) -> None:
        super().__init__()
        self.config = config
        self.shape = shape
        self.calibration: dict[int, Sequence[LogOdds]] = {}
        """By distance: the calibration of each layer pair. Distances without calibration are missing."""
        self.learned_from: frozenset[str] | None = None
        """Hashes (`Document.hash`) of the documents used for fitting or selection; None if unknown."""
        self._checked: set[tuple[int, int]] = set()
        """Targets and distances whose first forecast was checked."""
        self._view: list[MoEView] = []  # a list hides the model's modules from nn.Module

    @property
    def ahead(self) -> tuple[int, ...]:
        """Layer distances that can be forecast, in ascending order."""
        return self.config.ahead

    @property
    def view(self) -> MoEView:
        """View of the model that the predictor is bound to."""
        assert self._view, f"{self.name}: bind(view) first"
        return self._view[0]

    def bind(self, view: MoEView) -> Predictor:
        """Attach the model's norms and routers, and return self.

        Raises:
            ExpertcastError: the model's L, E, K or D differ from the predictor's.
        """
        if view.shape != self.shape:
            raise ExpertcastError(
                f"predictor {self.name} is for a model of {self.shape.as_dict()}, this model has "
                f"{view.shape.as_dict()}: train one for this model with `expertcast train`"
            )
        self._view[:] = [view]
        return self

    def check_ahead(self, ahead: int) -> None:
        """Raise :class:`ExpertcastError` if `ahead` is not one of `self.ahead`."""
        self.config.check_ahead(ahead, self.name)

    @torch.no_grad()
    def forecast(self, state: RouterState, ahead: int = 1) -> Forecast:
        """Forecast the routing of layer `state.layer + ahead`.

        Args:
            state: router state of T tokens at one layer.
            ahead: distance in layers, one of `self.ahead`.

        Raises:
            ExpertcastError: `ahead` is not one of `self.ahead`, or the target layer does not exist.
        """
        self.check_ahead(ahead)
        target = state.layer + ahead
        if target >= self.shape.layers:
            raise ExpertcastError(f"layer {target} does not exist: the model has MoE layers 0..{self.shape.layers - 1}")
        try:
            forecast = self._forecast(state, target, ahead)
            if (target, ahead) not in self._checked and torch._C._get_tracing_state() is None:
                self._check(forecast.logits_TE, len(state.residual_TD))
                self._checked.add((target, ahead))
        except Exception as error:
            if type(self).__module__.startswith("expertcast."):
                raise
            why = str(error) if isinstance(error, ExpertcastError) else f"{type(error).__name__}: {first_line(error)}"
            raise ExpertcastError(f"predictor {self.name}, from layer {state.layer} to {target}: {why}") from error
        forecast.log_odds = self.log_odds(state.layer, ahead)
        return forecast

    def _check(self, logits_TE: Tensor, tokens: int) -> None:
        """Raise :class:`ExpertcastError` for logits of another shape, or with NaN: for the first of each layer, since
        on a device the check waits for the computation."""
        if logits_TE.shape != (tokens, self.shape.experts):
            raise ExpertcastError(f"logits of shape {list(logits_TE.shape)}, not {[tokens, self.shape.experts]}")
        if logits_TE.isnan().any():
            raise ExpertcastError("logits are NaN: mask the rows of previous_logits_TLE without a previous token")

    def log_odds(self, layer: int, ahead: int) -> LogOdds | None:
        """Return the calibration of forecasts from `layer` to `layer + ahead`, or None."""
        pairs = self.calibration.get(ahead)
        return None if pairs is None else pairs[layer]

    def _forecast(self, state: RouterState, target: int, ahead: int) -> Forecast:
        logits_TE = self.logits(state, ahead)
        ids_TK, weights_TK = self.view[target].route(logits_TE)
        return Forecast(layer=target, logits_TE=logits_TE, topk_ids_TK=ids_TK, topk_weights_TK=weights_TK)

    @abstractmethod
    def logits(self, state: RouterState, ahead: int) -> Tensor:
        """Compute logits [T, E] for layer `state.layer + ahead`, which exists."""

    def maps(self, layer: int, ahead: int) -> Maps | None:
        """Return the forecast from `layer` to `layer + ahead` as linear maps of its inputs, or None if not possible.

        The runtime folds several predictors' maps into one matrix product (:mod:`expertcast.predictors.folded`).
        """
        return None

    def rungs(self) -> Mapping[str, Predictor]:
        """Return the forecasters that this predictor contains, by name, bound; the last is the predictor itself.

        Earlier rungs share its tensors, cost less and are less accurate. The runtime uses the rung that saves the most
        time.
        """
        return {self.name: self}

    def executed(self) -> Predictor:
        """Return the predictor whose forecasts are executed in this one's place: itself or a cheaper one."""
        return self

    def wants_early(self, layer: int, ahead: int) -> bool:
        """Return whether a forecast from `layer` to `layer + ahead` reads `RouterState.early_TD`."""
        return self.uses_early

    def stand_in(self, state: RouterState) -> Tensor:
        """Approximate the output [T, D] of block `state.layer`, the input of early attention, if `uses_early`."""
        raise NotImplementedError(f"{self.name} has no early attention")

    def input_vector(self, state: RouterState, ahead: int) -> Tensor | None:
        """Return the predictor's approximation [T, D] of s_{l+ahead}, if it has one; evaluation scores its cosine."""
        return None

    def __repr__(self) -> str:
        shape = self.shape
        return (
            f"{type(self).__name__}(layers={shape.layers}, experts={shape.experts}, top_k={shape.top_k}, "
            f"hidden={shape.hidden}, ahead={list(self.ahead)})"
        )


# Registries; classes are registered in the `__init__.py` of their folder


class Registered(Protocol):
    """Class with a registry name."""

    name: ClassVar[str]


R = TypeVar("R", bound=Registered)
P = TypeVar("P", bound=Predictor)


class Registry(Generic[R]):
    """Classes of one kind by name, in order of registration."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._classes: dict[str, type[R]] = {}

    def register(self, cls: type[R]) -> type[R]:
        """Register a class under its `name`; raises :class:`ExpertcastError` if another class has the same name."""
        if self._classes.setdefault(cls.name, cls) is not cls:
            raise ExpertcastError(
                f"{self.kind} name {cls.name!r} is taken by {self._classes[cls.name].__name__}: choose another name"
            )
        return cls

    def get(self, name: str) -> type[R]:
        """Return the class with this name; raises :class:`ExpertcastError` for unknown names."""
        if name not in self._classes:
            raise ExpertcastError(f"unknown {self.kind} {reprlib.repr(name)}: {self.allowed()}")
        return self._classes[name]

    def classes(self) -> list[type[R]]:
        """Return all classes in order of registration."""
        return list(self._classes.values())

    def names(self) -> list[str]:
        """Return all names in order of registration."""
        return list(self._classes)

    def allowed(self) -> str:
        """Return the end of an error message that lists the names."""
        return f"choose from {', '.join(self._classes)}"


PREDICTORS: Registry[Predictor] = Registry("predictor")
predictor_class, names = PREDICTORS.get, PREDICTORS.names


def register(cls: type[P]) -> type[P]:
    """Register a predictor class under its `name`, so that commands and checkpoints find it; a class decorator.

    Args:
        cls: subclass of :class:`Predictor` with a `name` of its own.

    Returns:
        The class.

    Raises:
        ExpertcastError: another class has the same name.

    Example:
        >>> import expertcast
        >>> @expertcast.register
        ... class Uniform(expertcast.Predictor):
        ...     name = "uniform"
        ...
        ...     def logits(self, state, ahead):
        ...         return 0 * state.logits_TE
        >>> expertcast.fit("uniform", expertcast.TraceDataset.open("traces")).predictor
        Uniform(layers=12, experts=64, top_k=4, hidden=192, ahead=[1])
    """
    PREDICTORS.register(cls)
    return cls
