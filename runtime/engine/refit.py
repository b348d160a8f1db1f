"""Online refit of a forecast's ridge part to the running sequences, used only where it improves the forecast.

Recursive least squares (:class:`RecursiveRidge`) fit the difference between router scores and forecasts. The targets
are the routers' own scores, also at layers that execute their forecast: a forecast is never its own target.

Each layer collects blocks of tokens, and full blocks wait in a queue (:class:`LayerRefit`). Each token has a budget of
`budget_ms`, which expires with the token; a block that overdraws it (by its own work at most) is paid back by the next
tokens, which collect no examples meanwhile.

T tokens, F features, R directions (F, or fewer), E routed experts, K experts per token.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from expertcast.data.batch import RouterCall
from expertcast.predictors.base import Predictor, RouterState
from expertcast.predictors.estimator import Estimator
from expertcast.predictors.hybrid import Hybrid
from expertcast.predictors.linear import Linear
from expertcast.predictors.messages import ExpertcastError, Json
from expertcast.predictors.view import MoELayer
from expertcast.runtime.engine.traced import TENSORS


class FadingMean:
    """A mean of values with fading weights; the first `memory` values have equal weights."""

    __slots__ = ("_memory", "_squares", "_weights", "count", "mean")

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0
        """Weighted mean of squares about the mean."""
        self._weights = 1.0
        """Sum of the squared weights: the inverse of the effective number of values."""

    def add(self, value: float) -> None:
        """Add a value."""
        self.count += 1
        share = max(1 / self.count, 1 / self._memory)
        off = value - self.mean
        self.mean += share * off
        self._squares = (1 - share) * (self._squares + share * off * off)
        self._weights = (1 - share) ** 2 * self._weights + share * share

    @property
    def error(self) -> float:
        """Standard error of the mean, as if the values were independent; infinite for fewer than two."""
        if self.count < 2:
            return math.inf
        return math.sqrt(self._squares / (1 - self._weights) * self._weights)


class RecursiveRidge:
    """Recursive least squares about a frozen map: what to add to it, from the errors that it makes.

    Sums are kept in information form: with rows x (a 1 behind the features) and errors e of the frozen map,

        gram  <- memory gram  + sum of x' x        cross <- memory cross + sum of x' e
        change = (gram + prior penalty)^-1 cross

    so that the frozen map is the answer as long as nothing was seen, and stays the prior however long the run is: what
    is forgotten is data, never the prior. The textbook form, which updates the inverse, forgets both, and its inverse
    grows without bound in directions that a text does not visit.

    Args:
        features: F, of N rows.
        outputs: E.
        prior: how many tokens the frozen map counts for, in every direction of features of unit variance.
        device: where the rows are.
    """

    def __init__(self, features: int, outputs: int, *, prior: float, device: torch.device | str = "cpu") -> None:
        self._prior = prior
        self._gram_GG = torch.zeros(features + 1, features + 1, device=device)
        self._cross_GE = torch.zeros(features + 1, outputs, device=device)
        self._ones_N1 = torch.ones(0, 1, device=device)

    def add(self, x_NF: Tensor, error_NE: Tensor, keep: float = 1.0) -> None:
        """Add rows.

        Args:
            x_NF: features of about unit variance.
            error_NE: targets less the frozen map's outputs.
            keep: factor on the weight of all earlier rows.
        """
        if len(self._ones_N1) != len(x_NF):
            self._ones_N1 = x_NF.new_ones(len(x_NF), 1)
        x_NG = torch.cat([x_NF, self._ones_N1], dim=1)
        self._gram_GG.addmm_(x_NG.T, x_NG, beta=keep)
        self._cross_GE.addmm_(x_NG.T, error_NE, beta=keep)

    def solve(self) -> Tensor | None:
        """Return the change of the frozen map [F + 1, E], its bias last; None: fp32 cannot solve for it."""
        penalised_GG = self._gram_GG.clone()
        penalised_GG.diagonal().add_(self._prior)
        factor_GG, failed = torch.linalg.cholesky_ex(penalised_GG)
        return None if failed else torch.cholesky_solve(self._cross_GE, factor_GG)


# One layer

MOST_DIRECTIONS = 512
"""Largest number of directions that are learned: time grows with its square and its cube."""


class RidgePart:
    """Weights [F, E] and bias [E] of one layer's forecast, with a copy of their first values.

    The weights change in place, where traced programs and captured graphs read them.

    Args:
        predictor: a bound `linear` or `estimator` that shares its weights with no other object.
        layer: the source layer.
        ahead: layers from it to the target.
    """

    def __init__(self, predictor: Linear | Estimator, layer: int, ahead: int) -> None:
        self.predictor, self.layer, self.ahead = predictor, layer, ahead
        name = "weight_PFE" if isinstance(predictor, Estimator) else "weight_PDE"
        self._weight_FE = predictor.get_buffer(f"{name}_{ahead}")[layer]
        self._bias_E = predictor.get_buffer(f"bias_PE_{ahead}")[layer]
        self._frozen = self._weight_FE.clone(), self._bias_E.clone()
        self._applied_GE: Tensor | None = None
        features = len(self._weight_FE)
        self.directions = min(features, MOST_DIRECTIONS)
        self._basis_FR = None if features == self.directions else _basis(self._weight_FE, self.directions)
        self._scale: tuple[Tensor, Tensor] | None = None
        """Mean and inverse spread [F] that standardise the features, where the predictor does not."""

    def directions_of(self, state: RouterState) -> Tensor:
        """Return the standardised inputs of the map [T, R], by the spread of the first call's tokens."""
        predictor, ahead = self.predictor, self.ahead
        if isinstance(predictor, Estimator):
            mean_F, inverse_F = (predictor.get_buffer(f"{name}_PF_{ahead}")[self.layer] for name in ("mean", "inverse"))
            x_TF = (predictor.features(state, ahead) - mean_F) * inverse_F
        else:
            x_TF = predictor.input_vector(state, ahead).float()
            if self._scale is None:
                spread_F = x_TF.std(dim=0, correction=0)
                self._scale = x_TF.mean(dim=0), 1 / spread_F.clamp(min=max(1e-6, 0.05 * float(spread_F.mean())))
            x_TF = (x_TF - self._scale[0]) * self._scale[1]
        return x_TF if self._basis_FR is None else x_TF @ self._basis_FR

    def frozen_logits(self, state: RouterState, x_TR: Tensor) -> Tensor:
        """Return the forecast logits [T, E] of the first weights; `x_TR` are the inputs of the map."""
        logits_TE = self.predictor.logits(state, self.ahead).float()
        return logits_TE if self._applied_GE is None else logits_TE - changed(x_TR, self._applied_GE)

    def apply(self, change_GE: Tensor | None) -> None:
        """Set the weights to their first values plus `change_GE` [R + 1, E]; None: to the first values, bit for bit."""
        weight_FE, bias_E = self._frozen
        if change_GE is not None:
            add_FE = change_GE[:-1] if self._basis_FR is None else self._basis_FR @ change_GE[:-1]
            bias_E = bias_E + change_GE[-1]
            if self._scale is not None:
                add_FE = add_FE * self._scale[1][:, None]
                bias_E = bias_E - self._scale[0] @ add_FE
            weight_FE = weight_FE + add_FE
        self._weight_FE.copy_(weight_FE)
        self._bias_E.copy_(bias_E)
        self._applied_GE = change_GE


def changed(x_TR: Tensor, change_GE: Tensor) -> Tensor:
    """Return the change of the logits [T, E]: `x_TR` times the rows of `change_GE`, plus its last row, the bias."""
    return torch.addmm(change_GE[-1], x_TR, change_GE[:-1])


def ridge_part(predictor: Predictor, layer: int, ahead: int) -> RidgePart | None:
    """Return the ridge part that forecasts layer `layer + ahead`; None where there is none.

    Args:
        predictor: any; a hybrid stands for the member that it chose for the layer.
        layer: the source layer.
        ahead: layers from it to the target.
    """
    if isinstance(predictor, Hybrid):
        predictor = predictor.member(predictor.chosen[ahead, layer + ahead])
    if isinstance(predictor, Linear) or (isinstance(predictor, Estimator) and predictor.config.form == "residual"):
        return RidgePart(predictor, layer, ahead)
    return None


def _basis(weight_FE: Tensor, directions: int) -> Tensor:
    """Return orthonormal directions [F, R]: those of the frozen map first, the others at random."""
    features, experts = weight_FE.shape
    generator = torch.Generator().manual_seed(0)
    others = torch.randn(features, max(0, directions - experts), generator=generator).to(weight_FE)
    basis_FR: Tensor = torch.linalg.qr(torch.cat([weight_FE, others], dim=1)).Q[:, :directions]
    return basis_FR.contiguous()


BLOCK = 32
"""Tokens that are learned from at once."""
SOLVE_EVERY = 4
"""Blocks between two solutions of a layer; the first ones come after 1 and 2."""
PRIOR = 50.0
"""Tokens that the frozen map counts for."""
MEMORY = 1000
"""Tokens over which what was learned fades to 1/e."""
MARGIN = 0.005
"""Recall that the refitted map must be better by to be used."""
ERRORS = 3.0
"""Standard errors that it must be better by."""
FIRST = 6
"""Blocks before it may be used."""
TESTED = 16
"""Blocks over which the running difference fades to 1/e."""
RECENT = 4
"""The same, of a difference that notices soon when the text is as it was again."""
LOSS = 0.01
"""Recall that the refitted map may lack of late before it is left."""


@dataclass(slots=True)
class Example:
    """Some tokens at one layer: what their forecast was made from, and what came."""

    state: RouterState
    logits_TE: Tensor
    ids_TK: Tensor


class LayerRefit:
    """Refits the forecasts of one layer; every block of tokens is a test before it is learned from.

    The frozen map and the refitted one, which has not seen the block, both forecast it. The refitted one is used from
    the block on after which the running difference in recall is above `MARGIN` and above `ERRORS` of its standard
    errors, until that is no longer above 0 or the recent one is below `-LOSS`.

    Args:
        part: what is changed.
        target: the layer whose routing is forecast.
    """

    def __init__(self, part: RidgePart, target: MoELayer) -> None:
        self.part, self._target = part, target
        self._ridge: RecursiveRidge | None = None
        self._change_GE: Tensor | None = None
        """The refitted map, less the frozen one."""
        self._examples: list[Example] = []
        self._rows = self._blocks = self.tokens = 0
        self._solves = False
        """Whether the rest of a block's work is to solve for the change."""
        self.guard = Guard()

    @property
    def full(self) -> bool:
        """Whether a full block waits."""
        return self._rows >= BLOCK

    @property
    def due(self) -> bool:
        """Whether the refitted map is to be solved for after as many blocks as were learned from."""
        return self._blocks in (1, 2) or self._blocks % SOLVE_EVERY == 0

    def takes(self, state: RouterState) -> bool:
        """Whether a token of this state can join the block."""
        known = state.previous_logits_TLE is not None or not self.part.predictor.uses_previous_token
        return known and not self.full

    def collect(self, example: Example) -> None:
        """Take some tokens."""
        self._examples.append(example)
        self._rows += len(example.logits_TE)

    def work(self) -> bool:
        """Half of what there is to do about a block; whether that was all."""
        if not self._solves:
            self.learn(_joined(self._examples))
            self._examples.clear()
            self._solves = self.due
        else:
            self.solve()
            self._solves = False
        if not self._solves:
            self._rows = 0
        return not self._solves

    def learn(self, block: Example) -> tuple[Tensor, Tensor]:
        """Test both maps on tokens that they have not seen, and learn from them.

        Returns:
            Ids [T, K] that the frozen map and the refitted one forecast.
        """
        x_TR = self.part.directions_of(block.state)
        frozen_TE = self.part.frozen_logits(block.state, x_TR)
        frozen_TK = refitted_TK = self._target.route(frozen_TE)[0]
        if self._change_GE is not None:
            refitted_TK = self._target.route(frozen_TE + changed(x_TR, self._change_GE))[0]
            gain = _found(refitted_TK, block.ids_TK) - _found(frozen_TK, block.ids_TK)
            was = self.guard.used
            if self.guard.add(gain / block.ids_TK.numel()) != was:
                self.part.apply(None if was else self._change_GE)
        error_TE = block.logits_TE.float() - frozen_TE
        if self._ridge is None:
            self._ridge = RecursiveRidge(x_TR.shape[1], error_TE.shape[1], prior=PRIOR, device=x_TR.device)
        self._ridge.add(x_TR, error_TE, keep=max(0.0, 1 - len(x_TR) / MEMORY))
        self.tokens += len(x_TR)
        self._blocks += 1
        return frozen_TK, refitted_TK

    def solve(self) -> None:
        """The refitted map from all that was learned."""
        assert self._ridge is not None
        solved_GE = self._ridge.solve()
        if solved_GE is not None:
            self._change_GE = solved_GE
            if self.guard.used:
                self.part.apply(solved_GE)

    def as_dict(self) -> Json:
        """See :meth:`OnlineRefit.as_dict`."""
        return {"tokens": self.tokens, "used": self.guard.used, "gain": self.guard.gain.mean}


class Guard:
    """Says whether what is tried may be used, from its gain on one block after another."""

    def __init__(self) -> None:
        self.used = False
        self.gain = FadingMean(TESTED)
        self._recent = FadingMean(RECENT)

    def add(self, gain: float) -> bool:
        """Take the gain on a block that what is tried had not seen; whether it may be used from now on."""
        self.gain.add(gain)
        self._recent.add(gain)
        mean, recent = self.gain.mean, self._recent.mean
        if self.used:
            self.used = mean > 0 and recent > -LOSS
        else:
            self.used = self.gain.count >= FIRST and recent > 0 and mean > max(MARGIN, ERRORS * self.gain.error)
        return self.used


def _joined(examples: Sequence[Example]) -> Example:
    """All tokens of some examples of one layer."""
    states = [example.state for example in examples]
    tensors = {name: [getattr(state, name) for state in states] for name in TENSORS}
    known = {name: torch.cat(parts) for name, parts in tensors.items() if all(part is not None for part in parts)}
    return Example(
        RouterState(layer=states[0].layer, **known),
        torch.cat([each.logits_TE for each in examples]),
        torch.cat([each.ids_TK for each in examples]),
    )


def _found(forecast_TK: Tensor, ids_TK: Tensor) -> int:
    """How many of the experts were forecast."""
    return int((forecast_TK[:, :, None] == ids_TK[:, None, :]).sum())


class OnlineRefit:
    """Refits the forecasts of one run.

    Args:
        predictor: `linear`, `estimator`, or a hybrid of them, bound; its weights are changed until :meth:`restore`.
        ahead: layers between a forecast and its target.
        budget_ms: milliseconds that a token may take for it on average.
        clock: seconds.

    Raises:
        ExpertcastError: the predictor has no ridge part.
    """

    def __init__(
        self, predictor: Predictor, ahead: int, budget_ms: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._ahead, self._budget_s = ahead, budget_ms / 1e3
        self.clock = clock
        """Says what the time is."""
        self._layers: dict[int, LayerRefit] = {}
        """By target layer."""
        for layer in range(len(predictor.view) - ahead):
            part = ridge_part(predictor, layer, ahead)
            if part is not None:
                self._layers[layer + ahead] = LayerRefit(part, predictor.view[layer + ahead])
        if not self._layers:
            raise ExpertcastError(
                f"refit changes the ridge part of linear and estimator, predictor {predictor.name!r} has none: leave "
                "refit out"
            )
        self._made: dict[int, RouterState] = {}
        self._due: deque[LayerRefit] = deque()
        self._credit_s = 0.0
        self._collects = False
        self.seconds = 0.0
        """Spent so far."""
        self.longest_s = 0.0
        """The longest that one token's layer had to wait for it."""

    def start(self) -> None:
        """A forward starts."""
        self._made.clear()
        self._credit_s = min(self._budget_s, self._credit_s + self._budget_s)
        self._collects = self._credit_s > 0

    def made(self, state: RouterState) -> None:
        """A forecast was made from this state."""
        layer = self._layers.get(state.layer + self._ahead)
        if self._collects and layer is not None and layer.takes(state):
            begin = self.clock()
            self._made[state.layer + self._ahead] = _kept(state)
            self._spent(begin)

    def routed(self, call: RouterCall) -> None:
        """A router has run."""
        state = self._made.pop(call.layer, None)
        if state is None or len(state.residual_TD) != len(call.logits_TE):
            return
        begin = self.clock()
        layer = self._layers[call.layer]
        layer.collect(Example(state, call.logits_TE.clone(), call.ids_TK.clone()))
        if layer.full:
            self._due.append(layer)
        self._spent(begin)

    def work(self) -> None:
        """Learn from a block that waits, if there is time; called while the layer's copies are under way."""
        if self._due and self._credit_s > 0:
            begin = self.clock()
            layer = self._due[0]
            with torch.inference_mode(False), torch.no_grad():
                if layer.work():
                    self._due.popleft()
            self._spent(begin)

    def _spent(self, begin: float) -> None:
        seconds = self.clock() - begin
        self._credit_s -= seconds
        self.seconds += seconds
        self.longest_s = max(self.longest_s, seconds)

    def restore(self) -> None:
        """The predictor's weights as they were, bit for bit."""
        with torch.inference_mode(False), torch.no_grad():
            for layer in self._layers.values():
                layer.part.apply(None)

    def as_dict(self) -> Json:
        """`refit`, with `seconds` and `longest_ms`; by target layer, `tokens` learned from, whether it is `used`, and
        `gain`: the recall of the refitted map less that of the frozen one, on tokens that neither had seen."""
        layers = {target: layer.as_dict() for target, layer in self._layers.items()}
        return {"refit": {"seconds": self.seconds, "longest_ms": self.longest_s * 1e3, "layers": layers}}


def _kept(state: RouterState) -> RouterState:
    """A copy, without the scores: nothing here reads them. The previous token's are written once, and shared."""
    return RouterState(
        layer=state.layer, residual_TD=state.residual_TD.clone(), router_input_TD=state.router_input_TD.clone(),
        logits_TE=state.logits_TE[:, :0], topk_ids_TK=state.topk_ids_TK.clone(),
        topk_weights_TK=state.topk_weights_TK.clone(), previous_logits_TLE=state.previous_logits_TLE,
        early_TD=None if state.early_TD is None else state.early_TD.clone(),
    )  # fmt: skip
