"""Which experts a layer uses soon, learnt from nothing but which ones it has used: online logistic regression.

L MoE layers, E routed experts per layer, F features of an expert. A visit is one token at one layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]

HALF_LIVES = (8, 1, 2, 4, 16, 32, 64)
"""Of the averages of use, in visits; with nothing learnt the first one is the forecast."""
_DECAY_H = 0.5 ** (1 / np.array(HALF_LIVES))
_PARTNERS = 4.0
"""Visits that an expert's rate counts for among what followed another expert."""
_OLDEST = 200
_HALVED = 4096
"""Visits of a layer after which what was counted since the start counts half: what is kept has bounds."""
FEATURES = len(HALF_LIVES) + 6


class LayerUse:
    """What one layer has used.

    Args:
        experts: E
        top_k: K
    """

    def __init__(self, experts: int, top_k: int) -> None:
        self._share = top_k / experts
        self._average_HE = np.zeros((len(HALF_LIVES), experts))
        self._weight_H = np.zeros(len(HALF_LIVES))
        self._uses_E = np.zeros(experts)
        self._visits = 0
        self._counted = 0.0
        self._last_E = np.full(experts, -_OLDEST)
        self._followed_EE = np.zeros((experts, experts), dtype=np.float32)
        """How often the second expert was used one visit after the first."""
        self._before: Sequence[int] = ()
        self._x_FE = np.zeros((FEATURES, experts))
        self._x_FE[0] = 1.0

    def visit(self, experts: Sequence[int]) -> None:
        """A token used these experts (distinct)."""
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
        if self._visits % _HALVED == 0:
            self._uses_E /= 2
            self._counted /= 2
            self._followed_EE /= 2

    def features(self) -> Numbers:
        """[F, E] of what was used so far: a constant, logs of the averages and of the share of all visits relative to
        chance, of the age, whether it was used last or never, and how much the experts used last are followed by it."""
        share, x_FE, heads = self._share, np.empty_like(self._x_FE), len(HALF_LIVES)
        x_FE[0] = 1.0
        np.log((self._average_HE / share + 1) / (self._weight_H + 1)[:, None], out=x_FE[1 : heads + 1])
        rate_E = (self._uses_E + share) / (self._counted + 1)
        np.log(rate_E / share, out=x_FE[heads + 1])
        age_E = np.minimum(self._visits - 1 - self._last_E, _OLDEST)
        x_FE[heads + 2] = np.log1p(age_E) - 2
        x_FE[heads + 3] = age_E == 0
        x_FE[heads + 4] = self._uses_E == 0
        x_FE[heads + 5] = 0.0
        if self._before:
            times_N = np.maximum(self._uses_E[self._before] - 1, 0) + _PARTNERS
            followed_E = (1 / times_N) @ self._followed_EE[self._before] / rate_E + (_PARTNERS / times_N).sum()
            x_FE[heads + 5] = np.log(followed_E / len(self._before))
        return x_FE


class UsageModel:
    """Log-odds that an expert is used within its layer's next `horizon` visits, one set of weights for all layers.

    Each visit labels the features of `horizon` visits ago and the weights take one Newton step on the log loss of all
    visits so far, with a quadratic prior around the first average: nothing is trained before, there is no step size
    and no randomness, and what is kept does not grow.
    """

    def __init__(self, *, experts: int, top_k: int, horizon: int, prior: float) -> None:
        """
        Args:
            experts: E
            top_k: K
            horizon: visits.
            prior: how firmly the weights stay where they begin, in visits' worth of evidence.
        """
        self._experts, self._top_k, self._horizon = experts, top_k, horizon
        self._layers: dict[int, LayerUse] = {}
        self._waiting: dict[int, deque[tuple[Numbers, Sequence[int]]]] = {}
        """Per layer the features before each of the last visits, and what these used."""
        self._weight_F = np.zeros(FEATURES)
        self._weight_F[:2] = np.log(min(0.5, horizon * top_k / experts)), 1.0
        self._precision_FF = np.eye(FEATURES) * prior
        self._x_FE: dict[int, Numbers] = {}

    def visit(self, layer: int, experts: Sequence[int]) -> None:
        """A token used these experts of a layer (0..E-1, distinct)."""
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

    def knows(self, layer: int) -> bool:
        """Whether the layer was visited."""
        return layer in self._layers

    def log_odds(self, layer: int) -> Numbers:
        """[E] of a layer that was visited."""
        odds_E: Numbers = self._weight_F @ self._x_FE[layer]
        return odds_E

    def _learn(self, waiting: Sequence[tuple[Numbers, Sequence[int]]]) -> None:
        x_FE = waiting[0][0]
        chance_E = 1 / (1 + np.exp(-np.clip(self._weight_F @ x_FE, -30, 30)))
        self._precision_FF += (x_FE * (chance_E * (1 - chance_E))) @ x_FE.T
        error_E = -chance_E
        error_E[list({expert for _, used in waiting for expert in used})] += 1
        self._weight_F = self._weight_F + np.linalg.solve(self._precision_FF, x_FE @ error_E)
