"""Evict by a forecast of the next uses that learns while it runs, from routing alone.

L MoE layers, E routed experts per layer, K experts per token. An expert's key is layer * E + expert.

Sources: that a learned next use, as an eviction rule, can lose to plain recency is 2608.07911's finding, hence the
shadow caches; the features, the regression and the choice among policies are this project's.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.policies.eviction.base import EvictionPolicy
from expertcast.runtime.policies.eviction.lfru import LFRU
from expertcast.runtime.policies.eviction.lfu import LFU
from expertcast.runtime.policies.eviction.lru import LRU
from expertcast.runtime.policies.eviction.shadow import Shadow
from expertcast.runtime.policies.eviction.usage import UsageModel
from expertcast.runtime.policies.eviction.victims import Rescored, Scores
from expertcast.runtime.policies.registry import CacheShape, PolicyConfig

_CLASSIC = (LFRU, LRU, LFU)
_FARTHEST = 8


@dataclass(frozen=True, kw_only=True)
class NextUseConfig(PolicyConfig):
    """How far ahead use is forecast, and how much is hedged."""

    horizon: int | None = None
    """Visits of its layer within which an expert's use counts (none: 1.5 times the tokens whose experts the cache
    holds, 1 to 8)."""
    prior: float = 3.0
    """How firmly the forecast stays an average of recent use, in visits' worth of evidence."""
    lead: float = 0.5
    """Log-odds that a use is worth less when its layer runs a whole token later."""
    hedge: bool = True
    """Follow lru, lfu or lfru while they would have missed less of late."""
    margin: float = 0.05
    """Share of the misses that another policy must save before it is followed."""
    memory: int = 64
    """Tokens over which misses are compared."""

    def __post_init__(self) -> None:
        if (self.horizon is not None and self.horizon < 1) or self.memory < 1:
            raise ExpertcastError(f"horizon={self.horizon}, memory={self.memory}: give 1 or more of both")
        if not (self.prior > 0 and self.lead >= 0 and 0 <= self.margin < 1):
            raise ExpertcastError(
                f"prior={self.prior}, lead={self.lead}, margin={self.margin}: give a prior above 0, a lead of 0 or "
                "more and a margin from 0, below 1"
            )


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
        self._pass = 0
        self._shown = -1
        """The layer whose prompt was shown token by token."""
        learned = [_Learned(self), *([_Learned(self)] if config.hedge else [])]
        classic = [(cls(PolicyConfig(), shape), cls(PolicyConfig(), shape)) for cls in _CLASSIC if config.hedge]
        self._held: list[EvictionPolicy] = [learned[0], *(held for held, _ in classic)]
        """Each policy over what really has a slot."""
        self._shadows = [Shadow(policy, shape.slots) for policy in (*learned[1:], *(own for _, own in classic))]
        self._misses = [0.0] * len(self._shadows)
        self._leader = 0

    @property
    def passes(self) -> int:
        """Forwards so far."""
        return self._pass

    def start_pass(self, fresh: bool) -> None:
        self._pass += 1
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


class _Learned(Rescored):
    """What the forecast alone would do. Lowest first: log-odds, less for layers that run later."""

    name = "learned"

    def __init__(self, owner: NextUse) -> None:
        super().__init__(owner.config, owner.shape)
        self._owner = owner
        self._next = [0] * owner.shape.layers
        """The forward in which each layer runs next."""

    def start_pass(self, fresh: bool) -> None:
        now = self._owner.passes
        for layer, due in enumerate(self._next):
            if due < now:  # the forward before was cut short, or another policy rules over the layer
                self._next[layer] = now
                self._changed.add(layer)

    def start_layer(self, layer: int, keys: Sequence[int]) -> None:
        self._next[layer] = self._owner.passes + 1
        self._changed.add(layer)

    def _score(self, layer: int) -> Scores:
        due = self._next[layer] + layer / self.shape.layers
        lead = self._owner.config.lead * due
        return Scores(self._owner.log_odds(layer), offset=-lead)
