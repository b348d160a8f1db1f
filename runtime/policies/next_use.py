"""Evict by a forecast of the next uses that learns while it runs, from routing alone.

L MoE layers, E routed experts per layer, K experts per token, F features of an expert. An expert's
key is layer * E + expert. A visit is one token at one layer.

Sources: that a learned next use, as an eviction rule, can lose to plain recency is 2608.07911's finding, hence the
shadow caches; the features, the regression and the choice among policies are this project's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from expertcast.runtime.policies.base import CacheShape, PolicyConfig, number
from expertcast.runtime.policies.eviction import LFRU, LFU, LRU, EvictionPolicy, NextRun, Scores


class Shadow:
    """A cache of keys alone that loads on demand: counts what a policy would have missed.

    Args:
        policy: decides; nobody else tells it of slots.
        slots: experts that fit.
    """

    def __init__(self, policy: EvictionPolicy, slots: int) -> None:
        self.policy, self._slots = policy, slots
        self._keys: set[int] = set()

    def run(self, layer: int, keys: Sequence[int]) -> int:
        """A layer needs these keys (distinct); returns its misses. Of more than fit, the last ones stay."""
        policy, held = self.policy, self._keys
        policy.start_layer(layer, keys)
        missing = [key for key in keys if key not in held]
        fitting = keys[-self._slots :]
        protected = set(fitting)
        for key in fitting:
            if key in held:
                continue
            if len(held) == self._slots:
                victim = policy.victim(protected)
                assert victim is not None, "the protected keys fit"
                policy.remove(victim)
                held.remove(victim)
            policy.insert(key)
            held.add(key)
        policy.use(fitting)
        return len(missing)


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
        """Counts [E, E]: uses of the second expert one visit after the first."""
        self._before: Sequence[int] = ()

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
        share, heads = self._share, len(HALF_LIVES)
        x_FE = np.empty((FEATURES, len(self._uses_E)))
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


_CLASSIC = (LFRU, LRU, LFU)
_FARTHEST = 8


@dataclass(frozen=True, kw_only=True)
class NextUseConfig(PolicyConfig):
    """How far ahead use is forecast, and how much is hedged."""

    horizon: int | None = number(None, "[1, inf)")
    """Visits of its layer within which an expert's use counts (none: 1.5 times the tokens whose experts the cache
    holds, 1 to 8)."""
    prior: float = number(3.0, "(0, inf)")
    """How firmly the forecast stays an average of recent use, in visits' worth of evidence."""
    lead: float = number(0.5, "[0, inf)")
    """Log-odds that a use is worth less when its layer runs a whole token later."""
    hedge: bool = True
    """Follow lru, lfu or lfru while they would have missed less of late."""
    margin: float = number(0.05, "[0, 1)")
    """Share of the misses that another policy must save before it is followed."""
    memory: int = number(64, "[1, inf)")
    """Tokens over which misses are compared."""


class NextUse(EvictionPolicy):
    """Gives up the expert that is least likely used soon, by :class:`UsageModel`; in shadow caches without weights it
    and the classic policies are tried all the time, and the one that misses least of late decides.

    A prompt's tokens are the first to learn from. Per layer that runs the model takes O(E F^2), each shadow what its
    policy takes; nothing grows with the number of tokens.
    """

    name = "next_use"
    config_class = NextUseConfig
    config: NextUseConfig
    reads_routing = True

    def __init__(self, config: NextUseConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        held = shape.slots / ((shape.sharing or shape.layers) * shape.top_k)
        horizon = config.horizon or min(_FARTHEST, max(1, round(1.5 * held)))
        self._model = UsageModel(experts=shape.experts, top_k=shape.top_k, horizon=horizon, prior=config.prior)
        self._shown = -1
        """The layer whose prompt was shown token by token."""
        learned = [_Learned(self), *([_Learned(self)] if config.hedge else [])]
        classic = [(cls(PolicyConfig(), shape), cls(PolicyConfig(), shape)) for cls in _CLASSIC if config.hedge]
        self._held: list[EvictionPolicy] = [learned[0], *(held for held, _ in classic)]
        """Each policy over what really has a slot."""
        self._shadows = [Shadow(policy, shape.slots) for policy in (*learned[1:], *(own for _, own in classic))]
        self._misses = [0.0] * len(self._shadows)
        self._leader = 0

    def start_pass(self, fresh: bool) -> None:
        decay = 1 - 1 / self.config.memory
        self._misses = [misses * decay for misses in self._misses]
        for policy in self._held:
            policy.start_pass(fresh)
        for shadow in self._shadows:
            shadow.policy.start_pass(fresh)

    def see_routing(self, layer: int, experts: Sequence[Sequence[int]]) -> None:
        self._shown = layer
        for row in experts:
            self._model.visit(layer, row)

    def start_layer(self, layer: int, keys: Sequence[int]) -> None:
        if self._shown != layer:
            self._model.visit(layer, [key - layer * self.shape.experts for key in keys])
        self._shown = -1
        for policy in self._held:
            policy.start_layer(layer, keys)
        for index, shadow in enumerate(self._shadows):
            self._misses[index] += shadow.run(layer, keys)
        if self._shadows:
            self._choose()

    def _choose(self) -> None:
        best = min(range(len(self._misses)), key=self._misses.__getitem__)
        if self._misses[best] < (1 - self.config.margin) * self._misses[self._leader]:
            self._leader = best

    def insert(self, key: int, full: bool = True) -> None:
        for policy in self._held:
            policy.insert(key, full)

    def use(self, keys: Sequence[int]) -> None:
        for policy in self._held:
            policy.use(keys)

    def remove(self, key: int) -> None:
        for policy in self._held:
            policy.remove(key)

    def clear(self) -> None:
        for policy in self._held:
            policy.clear()

    def victim(self, protected: Container[int]) -> int | None:
        return self._held[self._leader].victim(protected)

    def log_odds(self, layer: int) -> Sequence[float]:
        """[E] that a layer's experts are used soon; of a layer that has not run yet all the same."""
        if not self._model.knows(layer):
            return [0.0] * self.shape.experts
        odds: list[float] = self._model.log_odds(layer).tolist()
        return odds


class _Learned(NextRun):
    """What the forecast alone would do. Lowest first: log-odds, less for layers that run later."""

    name = "learned"

    def __init__(self, owner: NextUse) -> None:
        super().__init__(owner.config, owner.shape)
        self._owner = owner

    def _score(self, layer: int) -> Scores:
        return Scores(self._owner.log_odds(layer), offset=-self._owner.config.lead * self._due(layer))
