"""Eviction by a model of the next uses that learns from routing while the model runs.

L MoE layers, E routed experts per layer, K experts per token, F features of an expert, H half-lives. The key of an
expert is layer * E + expert. A visit is one token at one layer.

Source: this project.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field

from expertcast.runtime.policies.base import CacheShape, PolicyConfig
from expertcast.runtime.policies.eviction import NextRun, Scores

Numbers = npt.NDArray[np.float64]

HALF_LIVES = (8, 1, 2, 4, 16, 32, 64)
"""Half-lives of the averages of use, in visits; before learning, the forecast is the first average."""
_DECAY_H = 0.5 ** (1 / np.array(HALF_LIVES))
_PAIR_PRIOR = 4.0
"""Weight, in visits, of an expert's overall rate in the estimate of its rate after another expert."""
_MAX_AGE = 200
_HALVING_PERIOD = 4096
"""Number of visits of a layer after which all counts are halved, so that they stay bounded."""
FEATURES = len(HALF_LIVES) + 6
"""Number of features, F."""


class LayerUse:
    """Statistics of the use of one layer's experts.

    Args:
        experts: experts of the layer, E.
        top_k: experts per token, K.
    """

    def __init__(self, experts: int, top_k: int) -> None:
        self._share = top_k / experts
        self._average_HE = np.zeros((len(HALF_LIVES), experts))
        self._weight_H = np.zeros(len(HALF_LIVES))
        self._uses_E = np.zeros(experts)
        self._visits = 0
        self._counted = 0.0
        self._last_E = np.full(experts, -_MAX_AGE)
        self._followed_EE = np.zeros((experts, experts), dtype=np.float32)
        """Number of visits that used the second expert directly after a visit that used the first [E, E]."""
        self._before: Sequence[int] = ()

    def visit(self, experts: Sequence[int]) -> None:
        """Count the distinct experts of one token."""
        used = list(experts)
        if self._before:
            self._followed_EE[np.ix_(self._before, used)] += 1
        self._before = used
        self._average_HE *= _DECAY_H[:, None]
        self._average_HE[:, used] += 1
        self._weight_H = self._weight_H * _DECAY_H + 1
        self._uses_E[used] += 1
        self._last_E[used] = self._visits
        self._visits += 1
        self._counted += 1
        if self._visits % _HALVING_PERIOD == 0:
            self._uses_E /= 2
            self._counted /= 2
            self._followed_EE /= 2

    def features(self) -> Numbers:
        """Return the features of each expert [F, E].

        In order: a constant; the log of each decayed average of use and of the share of all visits, relative to chance;
        the log of the age; whether the last visit used the expert; whether no visit did; the log of how much more
        often than usual it follows the experts of the last visit.
        """
        share, heads = self._share, len(HALF_LIVES)
        x_FE = np.empty((FEATURES, len(self._uses_E)))
        x_FE[0] = 1.0
        np.log((self._average_HE / share + 1) / (self._weight_H + 1)[:, None], out=x_FE[1 : heads + 1])
        rate_E = (self._uses_E + share) / (self._counted + 1)
        np.log(rate_E / share, out=x_FE[heads + 1])
        age_E = np.minimum(self._visits - 1 - self._last_E, _MAX_AGE)
        x_FE[heads + 2] = np.log1p(age_E) - 2
        x_FE[heads + 3] = age_E == 0
        x_FE[heads + 4] = self._uses_E == 0
        x_FE[heads + 5] = 0.0
        if self._before:
            times_N = np.maximum(self._uses_E[self._before] - 1, 0) + _PAIR_PRIOR
            followed_E = (1 / times_N) @ self._followed_EE[self._before] / rate_E + (_PAIR_PRIOR / times_N).sum()
            x_FE[heads + 5] = np.log(followed_E / len(self._before))
        return x_FE


class UsageModel:
    """Online logistic regression of whether an expert is used within the next `horizon` visits of its layer.

    All layers share the weights. Each visit labels the features of `horizon` visits ago, and the weights take one
    Newton step on the log loss of all visits so far. A quadratic prior holds the weights at the first average of use.
    The model needs no training, step size or random numbers, and its memory is constant.
    """

    def __init__(self, *, experts: int, top_k: int, horizon: int, prior: float) -> None:
        """
        Args:
            experts: experts per layer, E.
            top_k: experts per token, K.
            horizon: number of visits ahead.
            prior: strength of the prior, in visits.
        """
        self._experts, self._top_k, self._horizon = experts, top_k, horizon
        self._layers: dict[int, LayerUse] = {}
        self._waiting: dict[int, deque[tuple[Numbers, Sequence[int]]]] = {}
        """Features before each of the last visits and the experts that the visit used, by layer."""
        self._weight_F = np.zeros(FEATURES)
        self._weight_F[:2] = np.log(min(0.5, horizon * top_k / experts)), 1.0
        self._precision_FF = np.eye(FEATURES) * prior
        self._x_FE: dict[int, Numbers] = {}

    def visit(self, layer: int, experts: Sequence[int]) -> None:
        """Learn from the distinct experts (0..E-1) of one token at a layer."""
        if layer not in self._layers:
            self._layers[layer] = LayerUse(self._experts, self._top_k)
            self._waiting[layer] = deque(maxlen=self._horizon)
            self._x_FE[layer] = self._layers[layer].features()
        waiting = self._waiting[layer]
        waiting.append((self._x_FE[layer], experts))
        if len(waiting) == self._horizon:
            self._learn(waiting)
        self._layers[layer].visit(experts)
        self._x_FE[layer] = self._layers[layer].features()

    def log_odds(self, layer: int) -> Numbers:
        """Return the log-odds of a use within the horizon [E]; zeros for a layer without visits."""
        if layer not in self._layers:
            return np.zeros(self._experts)
        odds_E: Numbers = self._weight_F @ self._x_FE[layer]
        return odds_E

    def _learn(self, waiting: Sequence[tuple[Numbers, Sequence[int]]]) -> None:
        x_FE = waiting[0][0]
        chance_E = 1 / (1 + np.exp(-np.clip(self._weight_F @ x_FE, -30, 30)))
        self._precision_FF += (x_FE * (chance_E * (1 - chance_E))) @ x_FE.T
        error_E = -chance_E
        error_E[list({expert for _, used in waiting for expert in used})] += 1
        self._weight_F = self._weight_F + np.linalg.solve(self._precision_FF, x_FE @ error_E)


_MAX_HORIZON = 8


@dataclass(frozen=True, kw_only=True)
class NextUseConfig(PolicyConfig):
    """Options of :class:`NextUse`."""

    horizon: Annotated[int, Field(ge=1)] | None = None
    """Number of visits of its layer within which an expert must be used (none: 1.5 times the number of tokens whose
    experts fit the cache, 1 to 8)."""
    prior: Annotated[float, Field(gt=0)] = 3.0
    """Strength of the prior, which is an average of recent use, in visits."""
    lead: Annotated[float, Field(ge=0)] = 0.5
    """Reduction of the log-odds of an expert whose layer runs one token later."""


class NextUse(NextRun):
    """Evicts the expert that is least likely to be used soon, by an online model of use.

    The score is the log-odds of a use within the horizon (:class:`UsageModel`), reduced for layers that run later. The
    model learns from the tokens of the prompt on. It takes O(E F^2) per layer and step, and memory is constant.
    """

    name = "next_use"
    config_class = NextUseConfig
    config: NextUseConfig
    reads_routing = True

    def __init__(self, config: NextUseConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        tokens = shape.slots / ((shape.sharing or shape.layers) * shape.top_k)
        horizon = config.horizon or min(_MAX_HORIZON, max(1, round(1.5 * tokens)))
        self._model = UsageModel(experts=shape.experts, top_k=shape.top_k, horizon=horizon, prior=config.prior)
        self._prompt_layer = -1
        """Layer whose prompt `see_routing` has learned from token by token."""

    def see_routing(self, layer: int, experts: Sequence[Sequence[int]]) -> None:
        self._prompt_layer = layer
        for row in experts:
            self._model.visit(layer, row)

    def start_layer(self, layer: int, keys: Sequence[int]) -> None:
        if self._prompt_layer != layer:
            self._model.visit(layer, [key - layer * self.shape.experts for key in keys])
        self._prompt_layer = -1
        super().start_layer(layer, keys)

    def _score(self, layer: int) -> Scores:
        return Scores(self._model.log_odds(layer).tolist(), offset=-self.config.lead * self._due(layer))
