"""Choice of the forecasts to make.

L MoE layers, E routed experts per layer, B sequences, S tokens of each in a pass, H rows of a forecast, D hidden size.
A key is layer * E + expert.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from expertcast.predictors.messages import Json
from expertcast.runtime.engine.cache import ExpertCache
from expertcast.runtime.recording.learning import Option, RunningMean, RunningSums, Share, Trials

_MEMORY = 0.1
"""Weight of the newest observation in running means."""


class Pace:
    """Running means over decode steps, per layer, without waiting for copies and forecasting, which decisions change.

    Args:
        residency: keeps the link's backlog from now on.
        layers: MoE layers of the model.
    """

    def __init__(self, residency: ExpertCache, layers: int) -> None:
        self._link, self._residency = residency.link, residency
        self._interval = [RunningMean() for _ in range(layers)]
        """Seconds from the routing of the layer before to that of this one."""
        self._fresh = True
        self._layer = -1
        self._reached_s = self._other_s = 0.0
        """Time at which the running layer was reached; seconds of waiting and forecasting until then."""
        self._forecast_s = 0.0
        """Seconds that forecasts took so far."""
        residency.paced = True

    def start_pass(self, fresh: bool) -> None:
        """Start a forward; `fresh`: with new sequences."""
        self._fresh, self._layer = fresh, -1

    def reached(self, layer: int) -> None:
        """Mark a layer whose experts are known and not requested yet."""
        now, other_s, before = self._link.clock(), self._residency.waited_s + self._forecast_s, self._layer
        if before == layer - 1 >= 0 and not self._fresh:
            self._interval[layer].observe(max(1e-9, now - self._reached_s - (other_s - self._other_s)))
        self._layer, self._reached_s, self._other_s = layer, now, other_s

    def forecast(self, seconds: float) -> None:
        """Count a forecast that took the model's thread so long."""
        self._forecast_s += seconds

    def computing_s(self, target: int) -> float | None:
        """Return the seconds of computing from the running layer's routing to that of a later one; None: unknown."""
        intervals = [own.value for own in self._interval[self._layer + 1 : target + 1]]
        return None if None in intervals else sum(value for value in intervals if value is not None)

    def awaited_s(self, now: float) -> float:
        """Return the seconds from `now` that the running layer waits for its copies: forecasts are free meanwhile."""
        residency = self._residency
        return 0.0 if residency.running.isdisjoint(residency.copies) else residency.backlog_s(now)


# Choice of forecasts


RECALL = 0.8
"""Share of the missing experts that a forecast finds, where its checkpoint does not say."""
_FIRM = 8.0
"""Missing experts that a checkpoint's recall counts for."""
_FORGET = 0.995
"""Factor on the assumed cost of a forecast each time that the cost prevents it: a cost that was measured at a bad
moment does not last."""
_EMPTY = 100
"""Prevented forecasts that a trial without any forecast counts for."""
_DEARER = 2.5
"""Cost of a rung that has never run, over that of the dearest cheaper one: between rungs without early attention the
ratio was 1.1 to 1.5, to the first one with it 2.1 to 2.8, and from that to the estimator 1.6."""
_CHECKING = 1
"""First forecasts for each layer whose cost does not count: programs are made and compared in them."""
_LEAST_S = 1e-6
"""Waiting below which a layer gets no forecast."""
_LITTLE = 0.01
_KEEP = 0.97
"""Weight that one step leaves to the earlier steps of its kind."""
_ENOUGH = 3.0
"""Steps of a kind from which its own duration is measured alone; before, the cost of its forecasts counts too."""
_STALE = 0.1
"""Weight that is left to the steps of a kind when it is no longer the best."""
_OUTLIER = 1.25
"""A step counts as at most so many times its expected duration."""
_SPREAD = 0.04
"""Assumed relative standard deviation of a step's duration without waiting. 6 to 10% were measured; a smaller value
makes fewer trials of kinds that are hardly better."""
_MARGIN = 1.0
"""Standard errors by which a rung must be better to replace the best kind; steps without forecasts need none."""
_NONE = "none"


@dataclass(slots=True, eq=False)
class _Kind:
    """Decode steps by one rung, or steps without forecasts.

    A step's duration is level x own + waited x demand: the level is common to all kinds, the demand is the time that
    copies of the step's missing experts take.
    """

    name: str
    found: Share
    """Share of a layer's missing experts that its forecasts had requested."""
    cost: RunningMean = field(default_factory=RunningMean)
    """Seconds of the model's thread per forecast, prefetching included."""
    made: int = 0
    calls: Counter[int] = field(default_factory=Counter)
    """Forecasts by target layer."""
    passed_over: int = 0
    """Forecasts in a row that its cost prevented."""
    own: RunningMean = field(default_factory=lambda: RunningMean(_KEEP))
    """Duration without waiting, over the level."""
    waited: RunningSums = field(default_factory=lambda: RunningSums(_KEEP))
    """Seconds of waiting; the weight is the demand."""

    @property
    def doubt(self) -> float:
        """Relative standard error of a step's expected duration."""
        return _SPREAD / math.sqrt(self.own.weight + 0.25)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steps(Option):
    """A kind of step as an option for trials."""

    kind: str

    @property
    def name(self) -> str:
        return self.kind


class ForecastGovernor:
    """Decides which rung of the predictor makes a decode step's forecasts, if any does, and for which layers.

    A forecast saves waiting. It finds a share f of the M experts that a layer lacks, and their copies run while the
    model computes until that layer, for w seconds: it saves f x min(M x copy, w). It costs c seconds, less those that
    the running layer waits for copies anyway. M, f, w and c are learned while the model runs. A layer gets a forecast
    where the saving exceeds the cost.

    One rung makes all forecasts of a step. Each kind of step (one per rung, and one without forecasts) has a measured
    duration apart from waiting and a measured share of waiting in the time that copies of the missing experts take; so
    tokens that lack many experts compare with tokens that lack few. Until a kind has run, its recall and the share of
    the copies that other kinds hide predict its waiting. The kind with the shortest expected step runs. Other kinds run
    as trials where they may be as good; trials that are expected to lose cost less than 1% of the time. Decisions
    depend on time, and never change a bit of the output.

    One governor holds for one number of sequences.

    Args:
        residency: experts in slots and in flight.
        pace: time of computing between layers.
        rungs: recall@k, where it is known, by name of each way to forecast, the cheapest first; the last one is the
            predictor itself.
    """

    def __init__(self, residency: ExpertCache, pace: Pace, rungs: Mapping[str, float | None]) -> None:
        self._link, self._residency, self._pace = residency.link, residency, pace
        self.rungs = [
            _Kind(name, Share(RECALL if recall is None else recall, firmness=_FIRM)) for name, recall in rungs.items()
        ]
        self._none = _Kind(_NONE, Share(0.0))
        self._missing: dict[int, Share] = {}
        """By layer, experts that it lacks."""
        self._made: dict[int, _Kind] = {}
        """By target layer, the rung whose forecast is pending."""
        self._level = RunningMean(_KEEP)
        """Seconds of a step without waiting, by the kind that ran first."""
        self._demand = RunningMean()
        """Seconds that copies of a step's missing experts take."""
        self._hidden = Share(0.5, firmness=max(self._link.copy_s, _LEAST_S), keep=_KEEP)
        """Share of the copies of found experts that no layer waits for, over all rungs."""
        self._trials = Trials()
        self._kind = self._best = self.rungs[0]
        self._start_s: float | None = None
        self._waited_s = 0.0
        """Seconds of waiting until the step began."""
        self._lacking = self._count = self._tried = 0
        """Missing experts and forecasts of this step; trials so far."""
        self._reasons: Counter[str] = Counter()

    @property
    def rung(self) -> int | None:
        """The rung of the running or next step; None: the step makes no forecasts."""
        return None if self._kind is self._none else self.rungs.index(self._kind)

    # one step

    def start(self) -> None:
        """Begin a decode step: its first layer has been reached."""
        self._made.clear()
        self._lacking = self._count = 0
        self._waited_s, self._start_s = self._residency.waited_s, self._link.clock()

    def end(self) -> None:
        """End the step: its last layer has been launched."""
        if self._start_s is None:
            return
        seconds, self._start_s = self._link.clock() - self._start_s, None
        first = not self._trials.seconds  # it runs with cold caches
        self._trials.spent(seconds)
        demand_s = self._lacking * self._link.copy_s
        if not demand_s:  # it says nothing of forecasts
            self._kind = self._best
        elif not first:
            self._learn(seconds, self._residency.waited_s - self._waited_s, demand_s)

    def choose(self, target: int) -> int | None:
        """Return the rung that is to forecast a layer; None: no forecast is worth its time."""
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
        price_s = (kind.cost.value or 0.0) * _FORGET**kind.passed_over
        if kind.found.value * most_s <= price_s - self._pace.awaited_s(self._link.clock()):
            kind.passed_over += 1
            self._reasons["it costs more than it saves"] += 1
            return None
        return self.rungs.index(kind)

    def _expected_missing(self, target: int) -> float:
        """Return the expected number of experts that a layer needs and that have no slot."""
        known = self._missing.get(target)
        return 1.0 if known is None else known.value

    def made(self, target: int, number: int, seconds: float) -> None:
        """Count a rung's forecast for a layer, which took the model's thread so long, prefetching included."""
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
        """Count what a layer lacked when it requested its experts.

        Args:
            layer: MoE layer.
            misses: experts without a slot.
            found: experts that have a slot by a forecast, and are requested for the first time.
        """
        missing = misses + found
        self._lacking += missing
        known = self._missing.get(layer)
        if known is None:
            known = self._missing[layer] = Share(float(missing), firmness=_LITTLE, keep=1 - _MEMORY)
        known.observe(missing)
        rung = self._made.pop(layer, None)
        if rung is not None and missing:
            rung.found.observe(found, missing)

    # kinds of steps

    def _learn(self, seconds: float, waited_s: float, demand_s: float) -> None:
        """Learn from a step, and choose the kind of the next one.

        Args:
            seconds: its duration.
            waited_s: part of it that was waiting for copies.
            demand_s: time that copies of its missing experts take.
        """
        kind, best = self._kind, self._best
        if not self._count and kind is not self._none:  # cost prevented all forecasts: the next trial is less strict
            kind.passed_over += _EMPTY
            kind = self._none
        if self._level.value is None:
            self._level.observe(seconds - waited_s)
        self._demand.observe(demand_s)
        gain, lost_s = self._expected(kind, demand_s) / max(seconds, 1e-9), seconds - self._expected(best, demand_s)
        counted = min(1.0, _OUTLIER * gain)
        own_s, waited_s = counted * (seconds - waited_s), counted * waited_s
        self._level.observe(own_s / self._own(kind))
        kind.own.observe(own_s / self._usual)
        kind.waited.fade(_KEEP)
        kind.waited.add(demand_s, waited_s)
        if kind is not self._none:
            self._hidden.observe(max(0.0, demand_s - waited_s), kind.found.value * demand_s)
        if self._kind is not best:
            self._tried += 1
            self._trials.tried(self._kind.name, gain, lost_s)
        self._choose_kind()

    @property
    def _usual(self) -> float:
        """Seconds of a step without waiting, by the kind that ran first."""
        value = self._level.value
        assert value is not None, "no step has run"
        return value

    def _own(self, kind: _Kind) -> float:
        """Return a step's duration without waiting, over the level."""
        known, best = kind.own, self._best.own.value
        if best is None:
            return 1.0
        more_s = (self._price(kind) - self._price(self._best)) * len(self._missing)
        guessed = 0.0 if kind is self._best else max(0.0, _ENOUGH - known.weight)
        guess = max(_LITTLE, best + more_s / self._usual)
        return (known.total + guessed * guess) / (known.weight + guessed)

    def _price(self, kind: _Kind) -> float:
        """Return the seconds of one forecast."""
        if kind is self._none or kind.cost.value is not None:
            return kind.cost.value or 0.0
        cheaper = self.rungs[: self.rungs.index(kind)]
        return _DEARER * max((own.cost.value or 0.0 for own in cheaper), default=0.0)

    def _expected(self, kind: _Kind, demand_s: float | None = None) -> float:
        """Return the expected seconds of a step of a kind, with a demand or with the usual one."""
        usual_s = self._demand.value or 0.0
        waited_s = usual_s * (1.0 - kind.found.value * self._hidden.value)
        share = (kind.waited.total + waited_s) / (kind.waited.weight + usual_s)
        return self._own(kind) * self._usual + share * (usual_s if demand_s is None else demand_s)

    def _choose_kind(self) -> None:
        """Choose the best kind, and the kind of the next step."""
        kinds = {kind.name: kind for kind in (*self.rungs, self._none)}
        seconds = {name: self._expected(kind) for name, kind in kinds.items()}
        for name in sorted(kinds, key=seconds.__getitem__):
            kind, usual_s = kinds[name], seconds[self._best.name]
            margin = 0.0 if kind is self._none else _MARGIN * kind.doubt
            if kind.own.weight >= 1.0 and seconds[name] * (1.0 + margin) < usual_s:
                self._best.own.fade(_STALE)
                self._best.waited.fade(_STALE)
                self._best = kind
                self._trials.won(name)
                break
        options = {name: _Steps(kind=name, seconds=seconds[name], doubt=kind.doubt) for name, kind in kinds.items()}
        best = options.pop(self._best.name)
        trial = None if self._kind is not self._best else self._trials.next(best, options)
        self._kind = kinds[trial or best.name]

    def report(self) -> Json:
        """Return the choices so far, with counts, reasons and present estimates, as plain values.

        `rungs` by name: how many forecasts were `made`, their `cost_ms`, and the share of missing experts that they
        `found`; `left_out`, by reason, forecasts that were not made; `best`, the kind of most steps at present;
        `takes`, by kind that has run, the duration of its steps over those of the best kind; `trials`, steps of other
        kinds; `lost_s`, seconds that these lost, of `seconds` in all.
        """
        ran = [kind for kind in (*self.rungs, self._none) if kind.own.weight and kind is not self._best]
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
            "takes": {kind.name: self._expected(kind) / self._expected(self._best) for kind in ran},
            "trials": self._tried,
            "lost_s": self._trials.lost_s,
            "seconds": self._trials.seconds,
        }
