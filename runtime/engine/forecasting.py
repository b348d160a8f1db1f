"""Forecasts at work: which are made, how much time a prefetch has, and what forecasts of whole tokens are good for.

A forecast of whole tokens is made when a token begins, for all of its layers and for the tokens after it. Evictions go
by it, and experts that it finds likely are asked for some layers before theirs: earlier than by any forecast of a
layer, and where no layer comes before.

L MoE layers, E routed experts per layer, B sequences, S tokens of each in a pass, H rows of a forecast, D hidden size.
A key is layer * E + expert.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from expertcast.predictors.messages import Json
from expertcast.predictors.view import ModelShape
from expertcast.runtime.engine.cache import ExpertCache
from expertcast.runtime.policies.eviction import Eviction
from expertcast.runtime.policies.prefetch import LinkState
from expertcast.runtime.recording.learning import BETTER, Option, RunningMean, RunningSums, Share, Trials

_MEMORY = 0.1
"""Weight of the newest observation in running means."""


class Pace:
    """Running means over decode steps, per layer. Waiting for copies and forecasting are left out: they are what a
    decision about forecasts changes.

    Args:
        residency: keeps how busy the link is from now on.
        layers: MoE layers of the model.
    """

    def __init__(self, residency: ExpertCache, layers: int) -> None:
        self._link, self._residency = residency.link, residency
        self._experts = experts = residency.experts
        self._interval = [RunningMean() for _ in range(layers)]
        """Seconds from the moment the layer before was reached to the moment this one is."""
        self._rate_LE = np.zeros((layers, experts))
        """Share of recent steps that used the expert."""
        self._fresh = True
        self._layer = -1
        self._reached_s = self._other_s = 0.0
        """Time at which the running layer was reached; seconds of waiting and forecasting until then."""
        self._forecast_s = 0.0
        """Seconds that forecasts took so far."""
        residency.paced = True

    def start_pass(self, fresh: bool) -> None:
        """A forward starts; `fresh`: with new texts."""
        self._fresh, self._layer = fresh, -1

    def reached(self, layer: int) -> None:
        """The layer's experts are known and about to be requested."""
        now, other_s, before = self._link.clock(), self._residency.waited_s + self._forecast_s, self._layer
        if before == layer - 1 >= 0 and not self._fresh:
            self._interval[layer].observe(max(1e-9, now - self._reached_s - (other_s - self._other_s)))
        self._layer, self._reached_s, self._other_s = layer, now, other_s

    def used(self, layer: int, experts: list[int]) -> None:
        """The layer's experts in this step."""
        self._rate_LE[layer] *= 1 - _MEMORY
        self._rate_LE[layer, experts] += _MEMORY

    def forecast(self, seconds: float) -> None:
        """A forecast took the model's thread so long."""
        self._forecast_s += seconds

    def computing_s(self, target: int) -> float | None:
        """Seconds of computing from the running layer's routing to that of a later one; None: not known yet."""
        intervals = [own.value for own in self._interval[self._layer + 1 : target + 1]]
        return None if None in intervals else sum(value for value in intervals if value is not None)

    def awaited_s(self, now: float) -> float:
        """Seconds from now on that the running layer waits for its own copies: what is computed meanwhile is free."""
        residency = self._residency
        return 0.0 if residency.running.isdisjoint(residency.copies) else residency.backlog_s(now)

    def transfer(self, target: int) -> LinkState:
        """What a selection for a later layer may count with."""
        residency, first, now = self._residency, target * self._experts, self._link.clock()
        copy_s, computing_s = self._link.copy_s, self.computing_s(target)
        left_s = copy_s if computing_s is None else computing_s
        backlog_s = residency.backlog_s(now)
        # the layer at work waits for its copies too, and so does what follows
        return LinkState(
            copy_s=copy_s,
            backlog_s=backlog_s,
            left_s=max(0.0, left_s - (now - self._reached_s)) + self.awaited_s(now),
            free=residency.free(target),
            resident=lambda expert: residency.holds(first + expert),
            victim_worth=lambda: self._worth(residency.victim(target)),
            seconds_of=None if self._link.pools is None else lambda expert: self._link.seconds(first + expert),
        )

    def _worth(self, victim: int | None) -> float:
        if victim is None:
            return 0.0
        layer, expert = divmod(victim, self._experts)
        known = self._residency.eviction.by_layer[layer].worth(victim)
        return float(self._rate_LE[layer, expert]) if known is None else known


# Which forecasts are made


RECALL = 0.8
"""Share of the missing experts that a forecast is taken to find, where its checkpoint does not say."""
_FIRM = 8.0
"""Missing experts that a checkpoint's recall counts for."""
_FORGET = 0.995
"""What a forecast is taken to cost shrinks by this whenever it is not made for that reason: a price that was measured
at a bad moment does not stand for ever."""
_EMPTY = 100
"""Forecasts not made that a trial without any counts for."""
_DEARER = 2.0
"""Cost of a rung that has never run, over that of the one before it."""
_CHECKING = 4
"""Forecasts for each layer whose seconds say nothing of later ones, and steps by each rung: programs are made and
compared in them."""
_LEAST_S = 1e-6
"""Waiting below which no forecast is thought of."""
_LITTLE = 0.01
_NEIGHBOURS = 5
"""Steps of the best kind whose median a trial of another one is compared with: those just before it."""
_EVERY = 2
"""Steps from one look at the kinds of steps to the next."""
_TRIALS = 32
"""Trials that are remembered."""
_FIRST_TRIALS = 3
"""Trials before another kind can become the best."""
_FARTHEST = 0.3
"""Part of a step by which another kind is expected to take longer or shorter, at most, before it was tried."""
_SPREAD = 0.05
"""Relative standard deviation of a step's seconds, at least."""
_NONE = "none"


@dataclass(slots=True, eq=False)
class _Rung:
    """One way to forecast and the steps that use it; or none, and the steps without forecasts."""

    name: str
    found: Share
    """Share of a layer's missing experts that it had under way."""
    cost: RunningMean = field(default_factory=RunningMean)
    """Seconds of the model's thread, with all that was asked for by it."""
    made: int = 0
    calls: Counter[int] = field(default_factory=Counter)
    """Forecasts by target layer: the first ones for each also check what later ones need not."""
    passed_over: int = 0
    """Times in a row that it was not made for its price."""
    saved: RunningSums = field(default_factory=lambda: RunningSums(1 - _MEMORY))
    """Seconds per step that it is expected to save."""
    steps: int = 0
    errors: deque[float] = field(default_factory=lambda: deque(maxlen=_TRIALS))
    """How much longer its trials took than was expected, in parts of a step."""

    @property
    def error(self) -> float:
        """Their median; one more of 0 stands for the expectation."""
        return statistics.median([0.0, *self.errors])

    @property
    def doubt(self) -> float:
        """Standard error of a step's expected duration, in parts of a step."""
        spread = statistics.stdev(self.errors) if len(self.errors) > 2 else _SPREAD
        return max(_SPREAD, min(spread, 1.0)) / math.sqrt(len(self.errors) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steps(Option):
    """Decode steps by one rung, or without forecasts."""

    kind: str

    @property
    def name(self) -> str:
        return self.kind


class ForecastGovernor:
    """Decides by which rung of the predictor a decode step's forecasts are made, if by any, and for which layers.

    A forecast for a layer is worth the waiting that it removes. Of M experts that the layer will miss it finds a share
    f, and their copies run while the model computes until that layer, for w seconds: it saves f x min(M x copy, w). It
    costs its own c seconds; as far as the running layer waits for copies anyway, it is free. M, f, w and c are learned
    while the model runs. A layer whose f x min(M x copy, w) - max(0, c - waiting) is not above 0 gets no forecast.

    One rung makes all forecasts of a step. Steps by the others, and steps without forecasts, are tried now and then,
    and the fastest kind is run: so is measured what the formula leaves out (experts that wrong copies evict, caches of
    the processor, following the model for early attention). Until a kind was tried, the formula says what it would
    take. Trials lose less than 1% of the time. Decisions depend on time, and never change a bit of the output.

    One governor holds for one number of sequences.

    Args:
        residency: says what is held and under way.
        pace: says what is computed between layers.
        rungs: ways to forecast by name, the cheapest first, with their recall@k where it is known; the last is the
            predictor itself.
        tokens_ahead: says what a layer will miss, where something forecasts whole tokens; else it is the running mean.
    """

    def __init__(
        self, residency: ExpertCache, pace: Pace, rungs: Mapping[str, float | None],
        tokens_ahead: TokensAhead | None = None,
    ) -> None:  # fmt: skip
        self._link, self._pace, self._tokens_ahead = residency.link, pace, tokens_ahead
        self.rungs = [
            _Rung(name, Share(RECALL if recall is None else recall, firmness=_FIRM)) for name, recall in rungs.items()
        ]
        self._none = _Rung(_NONE, Share(0.0))
        self._missing: dict[int, Share] = {}
        self._made: dict[int, _Rung] = {}
        """By target layer, what has made the forecast that is under way for it."""
        self._layers: list[tuple[float, float]] = []
        """Per layer of the step, seconds that perfect forecasts would save, and seconds in which a forecast is free."""
        self._recent = deque[float](maxlen=_NEIGHBOURS)
        """Seconds of the last steps of the best kind."""
        self._trials = Trials()
        self._kind = self._best = self.rungs[0]
        self._start_s: float | None = None
        self._count = 0
        """Forecasts of this step."""
        self._steps = 0
        self._reasons: Counter[str] = Counter()

    @property
    def rung(self) -> int | None:
        """The rung of the step that runs or comes next; None: it makes no forecasts."""
        return None if self._kind is self._none else self.rungs.index(self._kind)

    # one step

    def start(self) -> None:
        """A decode step has reached its first layer."""
        self._made.clear()
        self._layers.clear()
        self._count, self._start_s = 0, self._link.clock()

    def end(self) -> None:
        """The step's last layer has been launched."""
        if self._start_s is None:
            return
        seconds, self._start_s = self._link.clock() - self._start_s, None
        self._trials.spent(seconds)
        self._learn(self._kind, seconds)
        self._kind, self._steps = self._best, self._steps + 1
        if self._steps % _EVERY == 0:
            self._expect()
            self._kind = self._next_trial() or self._best

    def _learn(self, kind: _Rung, seconds: float) -> None:
        """A step of a kind took so long."""
        if kind is not self._none:
            kind.steps += 1
            if not self._layers:  # nothing was missing: it says nothing of forecasts
                return
        new, empty = 0 < kind.steps <= _CHECKING, not self._count and kind is not self._none
        if kind is self._best:
            if not new:
                self._recent.append(seconds)
        elif new or empty:
            kind.passed_over += _EMPTY * empty  # its price forbade all forecasts: the next trial is less strict
            self._trials.tried(kind.name, BETTER if new else 1.0, seconds - statistics.median(self._recent))
        else:
            self._tried(kind, seconds)

    def choose(self, target: int) -> int | None:
        """The rung that is to forecast a layer; None: no forecast is worth its time."""
        kind = self._kind
        if kind is self._none:
            self._reasons["steps without forecasts are faster"] += 1
            return None
        copy_s, computing_s = self._link.copy_s, self._pace.computing_s(target)
        missing_s = self._expected_missing(target) * copy_s
        most_s = missing_s if computing_s is None else min(missing_s, computing_s)
        if most_s < _LEAST_S:
            self._reasons["nothing is missing"] += 1
            return None
        free_s = self._pace.awaited_s(self._link.clock())
        self._layers.append((most_s, free_s))
        price_s = (kind.cost.value or 0.0) * _FORGET**kind.passed_over
        if kind.found.value * most_s <= price_s - free_s:
            kind.passed_over += 1
            self._reasons["it costs more than it saves"] += 1
            return None
        return self.rungs.index(kind)

    def _expected_missing(self, target: int) -> float:
        """Experts that a layer will need and that have no slot."""
        found = None if self._tokens_ahead is None else self._tokens_ahead.missing(target)
        if found is not None:
            return found
        known = self._missing.get(target)
        return 1.0 if known is None else known.value

    def made(self, target: int, number: int, seconds: float) -> None:
        """The rung's forecast for a layer, with all that was asked for by it, took the model's thread so long."""
        rung = self.rungs[number]
        rung.calls[target] += 1
        rung.cost.fade(_FORGET**rung.passed_over)
        if rung.calls[target] > _CHECKING:
            rung.cost.observe(max(seconds, 1e-9))
        rung.made += 1
        rung.passed_over = 0
        self._count += 1
        self._made[target] = rung

    def requested(self, layer: int, misses: int, found: int) -> None:
        """A layer asked for its experts.

        Args:
            layer: which.
            misses: of its experts that had no slot.
            found: those that have one by a forecast, and are asked for the first time.
        """
        missing = misses + found
        known = self._missing.get(layer)
        if known is None:
            known = self._missing[layer] = Share(float(missing), firmness=_LITTLE, keep=1 - _MEMORY)
        known.observe(missing)
        rung = self._made.pop(layer, None)
        if rung is not None and missing:
            rung.found.observe(found, missing)

    # kinds of steps

    def _expect(self) -> None:
        """Update the seconds that steps by each rung are expected to save, from the layers of the last step."""
        price_s = 0.0
        for rung in self.rungs if self._layers else ():
            price_s = _DEARER * price_s if rung.cost.value is None else rung.cost.value
            found = rung.found.value
            each_s = [found * most_s - max(0.0, price_s - free_s) for most_s, free_s in self._layers]
            saved_s = sum(own for own in each_s if own > 0) or sum(each_s)  # it pays nowhere: what trying it costs
            rung.saved.fade(1 - _MEMORY)
            rung.saved.add(1.0, saved_s)

    def _expected(self, kind: _Rung, usual_s: float) -> float:
        """By how many parts of a step, which usually takes so long, one of the kind is longer by the formula."""
        best_s, own_s = (own.saved.total / (own.saved.weight or 1.0) for own in (self._best, kind))
        return max(-_FARTHEST, min(_FARTHEST, (best_s - own_s) / usual_s))

    def _ratio(self, kind: _Rung, usual_s: float) -> float:
        """Duration of the kind's steps over that of the best kind's."""
        return max(_LITTLE, 1.0 + self._expected(kind, usual_s) + kind.error - self._best.error)

    def _tried(self, kind: _Rung, seconds: float) -> None:
        """A step of a kind that is not the best took so long."""
        usual_s = statistics.median(self._recent)
        before = self._ratio(kind, usual_s)
        kind.errors.append(seconds / usual_s - 1.0 - self._expected(kind, usual_s) + self._best.error)
        self._trials.tried(kind.name, before * usual_s / seconds, seconds - usual_s)
        count, margin = len(kind.errors), 0.0  # where it makes no difference, there are no forecasts
        if kind is not self._none:
            margin = max(kind.doubt, min(1.0, statistics.stdev(self._recent) / usual_s) / math.sqrt(count + 1))
        if count >= _FIRST_TRIALS and self._ratio(kind, usual_s) + margin < 1.0:
            self._best = kind
            self._trials.won(kind.name)
            self._recent.clear()

    def _next_trial(self) -> _Rung | None:
        """The kind that is not the best, where it is time to run it once more."""
        if len(self._recent) < _NEIGHBOURS:
            return None
        usual_s = statistics.median(self._recent)
        others = {own.name: own for own in (*self.rungs, self._none) if own is not self._best}
        best = _Steps(kind=self._best.name, seconds=usual_s)
        key = self._trials.next(
            best,
            {
                name: _Steps(kind=name, seconds=self._ratio(own, usual_s) * usual_s, doubt=own.doubt)
                for name, own in others.items()
            },
        )
        return None if key is None else others[key]

    def report(self) -> Json:
        """The choices so far, with counts, reasons and present estimates, as plain values.

        `rungs` by name: how many forecasts were `made`, their `cost_ms`, and the share of missing experts that they
        `found`; `left_out`, by reason, those that were not made; `best`, by what most steps make forecasts now;
        `takes`, by what was tried, how many times as long as these its steps take, and `trials` how many there were;
        `lost_s` by trials of `seconds`.
        """
        usual_s = statistics.median(self._recent) if self._recent else 1.0
        tried = [own for own in (*self.rungs, self._none) if own.errors and own is not self._best]
        return {
            "rungs": {
                rung.name: {
                    "made": rung.made,
                    "cost_ms": None if rung.cost.value is None else 1e3 * rung.cost.value,
                    "found": rung.found.value,
                }
                for rung in self.rungs
            },
            "left_out": dict(self._reasons),
            "best": self._best.name,
            "takes": {own.name: self._ratio(own, usual_s) for own in tried},
            "trials": sum(len(own.errors) for own in tried),
            "lost_s": self._trials.lost_s,
            "seconds": self._trials.seconds,
        }


# Forecasts of whole tokens

LIKELY = 0.2
"""Experts that are at least so likely to be used are asked for. A miss keeps the model waiting for a whole copy, and a
wrong copy that has not begun when its layer runs is dropped."""
REACH = 4
"""Layers that experts are asked for before theirs: copies come in the order in which layers need them, and what a later
forecast asks for has few of them before it."""
_THINKABLE = 0.03
"""Less likely experts are not counted among those that may be missing."""


class TokenForecasts(Protocol):
    """What follows a run and forecasts the routing of the next tokens."""

    def start(self, fresh: bool, token_BS: Tensor | None = None) -> Tensor | None:
        """A forward starts; `fresh`: with new texts; `token_BS`: the ids of its tokens, where they are known.

        Returns:
            New probabilities [H, L, E], where a forecast is due: of the token that starts and of those after it.
        """

    def see(self, layer: int, residual_TD: Tensor, logits_TE: Tensor, sequences: int) -> None:
        """A router has run: `residual_TD`, `logits_TE` and `sequences` as for
        :meth:`expertcast.runtime.engine.engine.LayerFlow.see`."""


class TokensAhead:
    """Passes what a forecaster sees on to the eviction policy and the residency.

    Args:
        forecasts: makes them.
        residency: books and rules.
        eviction: goes by the forecasts where it takes them.
        shape: of the model.
        layers: the first so many layers' experts are loaded early.
        likely: the least probability at which one is.
    """

    def __init__(
        self, forecasts: TokenForecasts, residency: ExpertCache, eviction: Eviction, shape: ModelShape, *, layers: int,
        likely: float = LIKELY,
    ) -> None:  # fmt: skip
        self._forecasts, self._residency, self._eviction = forecasts, residency, eviction
        self._shape, self._layers, self._least = shape, layers, likely
        self._likely: list[list[tuple[float, int]]] | None = None
        """Per layer of the token under way, probability and key of the experts that can be thought of; None where
        nothing is known of it."""

    def start(self, fresh: bool, token_BS: Tensor | None) -> None:
        """A forward starts; arguments are those of :meth:`TokenForecasts.start`."""
        self._likely = None
        probability_HLE = self._forecasts.start(fresh, token_BS)
        if probability_HLE is None:
            return
        if self._eviction.reads_tokens:
            self._eviction.see_tokens(probability_HLE)
        self._likely = self._sorted(probability_HLE[0])
        for layer in range(min(REACH, self._layers)):
            self._ask(layer)

    def see(self, layer: int, residual_TD: Tensor, logits_TE: Tensor, sequences: int) -> None:
        """A router has run; arguments are those of :meth:`TokenForecasts.see`."""
        self._forecasts.see(layer, residual_TD, logits_TE, sequences)

    def finish(self, layer: int) -> None:
        """All forecasts of a layer have been asked for."""
        if layer + REACH < self._layers:
            self._ask(layer + REACH)
        if self._eviction.reads_tokens and self._residency.idle:
            self._load_idle(layer)

    def missing(self, layer: int) -> float | None:
        """Expected number of experts that a layer needs and that have no slot; None: unknown."""
        if self._likely is None:
            return None
        slots = self._residency.pool.slots
        return sum(probability for probability, key in self._likely[layer] if key not in slots)

    def _sorted(self, probability_LE: Tensor) -> list[list[tuple[float, int]]]:
        probability_N = probability_LE.detach().cpu().numpy().ravel()
        keys = np.flatnonzero(probability_N >= _THINKABLE)
        found: list[list[tuple[float, int]]] = [[] for _ in range(self._shape.layers)]
        for key, probability in zip(keys.tolist(), probability_N[keys].tolist(), strict=True):
            found[key // self._shape.experts].append((probability, key))
        return found

    def _ask(self, layer: int) -> None:
        """Load what a layer is likely to need and has not, and keep what it has; nothing where all of it is there."""
        if self._likely is None:
            return
        slots = self._residency.pool.slots
        sure = [entry for entry in self._likely[layer] if entry[0] >= self._least]
        if any(key not in slots for _, key in sure):
            self._residency.prefetch([key for _, key in sorted(sure, reverse=True)])

    def _load_idle(self, layer: int) -> None:
        """The link has nothing to do: experts of coming tokens that are likelier than those they replace."""
        residency, by_layer = self._residency, self._eviction.by_layer
        for key, worth in by_layer[layer].wanted():
            victim = residency.victim(key // self._shape.experts)
            lost = 0.0 if victim is None else by_layer[victim // self._shape.experts].worth(victim) or 0.0
            if worth > lost:
                residency.load_idle(key)


def early_layers(shape: ModelShape, *, keep: bool, loads: bool, forecast_from: int | None) -> int:
    """How many of a model's first layers are loaded by forecasts of whole tokens.

    Args:
        shape: of the model.
        keep: experts stay in their slots.
        loads: whether anything is loaded early at all.
        forecast_from: the first layer that a forecast by another layer is made for; None: there are no such forecasts.
            Without a cache such a forecast, which is surer, has the link to itself.
    """
    if not loads:
        return 0
    return shape.layers if keep or forecast_from is None else min(forecast_from, shape.layers)
