"""Choice of the forecasts to make.

L MoE layers, E routed experts per layer, B sequences, S tokens of each in a pass, H rows of a forecast, D hidden size.
A key is layer * E + expert.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping

from expertcast.predictors.messages import Json
from expertcast.runtime.engine.cache import ExpertCache
from expertcast.runtime.recording.learning import LOSS, RunningMean, Share

_MEMORY = 0.1
"""Weight of the newest observation in running means."""


def _mean(known: Collection[float], unknown: float) -> float:
    """Return the mean of known values: those of layers that have not been reached are expected to be as large."""
    return sum(known) / len(known) if known else unknown


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

    def computing_s(self, target: int) -> float:
        """Return the seconds of computing from the running layer's routing to that of a later one; inf: unknown."""
        between = [own.value for own in self._interval[self._layer + 1 : target + 1]]
        known = [own.value for own in self._interval if own.value is not None] if None in between else []
        return sum(_mean(known, math.inf) if seconds is None else seconds for seconds in between)

    def awaited_s(self) -> float:
        """Return the seconds for which the running layer waits for its copies: forecasts are free meanwhile."""
        residency = self._residency
        return 0.0 if residency.running.isdisjoint(residency.copies) else residency.backlog_s(self._link.clock())


# Choice of forecasts


RECALL = 0.8
"""Share of the missing experts that a forecast finds, where its checkpoint does not say."""
_FIRM = 8.0
"""Missing experts that a checkpoint's recall counts for, and copies that count for the share of waiting it predicts."""
_DEARER = 2.5
"""Cost of a rung that has never run, over that of the dearest one that has: between rungs without early attention the
ratio was 1.1 to 1.5, to the first one with it 2.1 to 2.8, and from that to the estimator 1.6."""
_KEEP = 0.97
"""Weight that one step leaves to the earlier steps of its kind."""
_OUTLIER = 1.25
"""A step counts as at most so many times its expected duration."""
_PAUSE = 16
"""Steps from one trial of a kind that is expected to lose to its next one, at least."""


class _Kind:
    """Decode steps by one rung, or steps without forecasts.

    Args:
        name: of the rung.
        recall: expected share of the missing experts that its forecasts find; None: unknown.
        copy_s: seconds of a copy.
    """

    def __init__(self, name: str, recall: float | None, copy_s: float) -> None:
        self.name, self.made, self.ran_s = name, 0, 0.0
        """Forecasts so far, and the time of the latest step."""
        expected = RECALL if recall is None else recall
        self.found, self.right = Share(expected, firmness=_FIRM), Share(expected, firmness=_FIRM)
        """Share of a layer's missing experts that its forecasts had requested, and of their copies that it used."""
        self.copies = RunningMean()
        """Copies that a forecast brings about."""
        self.cost = RunningMean()
        """Seconds of the model's thread per forecast, prefetching included."""
        self.targets: set[int] = set()
        """Layers that it has forecast."""
        self.own = RunningMean(_KEEP)
        """Seconds of a step without waiting."""
        self.waited = Share(1.0 - self.found.value / 2, firmness=_FIRM * copy_s, keep=_KEEP)
        """Seconds of waiting per second that copies of the step's missing experts take."""


class ForecastGovernor:
    """Decides which rung of the predictor makes a decode step's forecasts, if any does, and for which layers.

    A forecast saves waiting. It finds a share f of the M experts that a layer lacks, and their copies run while the
    model computes until that layer, for w seconds: it saves f x min(M x copy, w). It costs c seconds, less those that
    the running layer waits for copies anyway, but not below 0. Some of its N copies are under way when the layer is
    reached, at most as many as the link begins at once: wrong ones among them delay it. M, f, w, c and N are learned
    while the model runs. A layer gets a forecast where the saving exceeds cost and delay.

    One rung makes all forecasts of a step. Each kind of step (one per rung, and one without forecasts) has a measured
    duration apart from waiting and a measured share of waiting in the time that copies of the missing experts take; so
    tokens that lack many experts compare with tokens that lack few. The kind that took least runs; another one replaces
    it after a step of its own. Such a trial takes all forecasts to be right until its own layers show that they are
    not, and leaves out their cost: so both are measured again. Trials that are expected to lose cost less than 1% of
    the time. Decisions depend on time, and never change a bit of the output.

    One governor holds for one number of sequences.

    Args:
        residency: experts in slots and in flight.
        pace: time of computing between layers.
        rungs: recall@k, where it is known, by name of each way to forecast, the cheapest first; the last one is the
            predictor itself.
    """

    def __init__(self, residency: ExpertCache, pace: Pace, rungs: Mapping[str, float | None]) -> None:
        self._link, self._residency, self._pace = residency.link, residency, pace
        self._kinds = {name: _Kind(name, own, self._link.copy_s) for name, own in {**rungs, "none": 0.0}.items()}
        *self.rungs, self._none = self._kinds.values()
        self._missing: dict[int, Share] = {}
        """By layer, experts that it lacks."""
        self._kind = self._best = self.rungs[0]
        self._tried, self._reasons = 0, Counter[str]()
        self._seconds = self._lost_s = 0.0
        """Seconds of all steps; seconds of trials beyond what the best kind would have taken."""
        self.start()

    @property
    def rung(self) -> int | None:
        """The rung of the running or next step; None: the step makes no forecasts."""
        return None if self._kind is self._none else self.rungs.index(self._kind)

    # one step

    def start(self) -> None:
        """Begin a decode step: its first layer has been reached."""
        self._made: dict[int, _Kind] = {}
        """By target layer, the rung that has forecast it in this step."""
        self._before: dict[int, int] = {}
        """By target layer, its prefetched copies before that forecast."""
        self._hope = None if self._kind is self._best else Share(1.0, firmness=_FIRM)
        """In a trial, the share of missing experts that its forecasts find."""
        self._lacking, self._first_s, self._new = 0, 0.0, False
        """Missing experts of this step; seconds of layers' first forecasts by a rung beyond a later one's; whether it
        made programs."""
        self._start_s, self._waited_s = self._link.clock(), self._residency.waited_s
        """Time at which the step began; seconds of waiting before it."""

    def choose(self, target: int) -> int | None:
        """Return the rung that is to forecast a layer; None: no forecast is worth its time."""
        kind, known, reason = self._kind, self._missing.get(target), ""
        copy_s, computing_s = self._link.copy_s, self._pace.computing_s(target)
        missing = _mean([own.value for own in self._missing.values()], 1.0) if known is None else known.value
        copies, hope = max(missing, kind.copies.value or 0.0), 0.0 if self._hope is None else self._hope.value
        saved_s = max(hope, kind.found.value) * min(missing * copy_s, computing_s)
        under_way_s = min(self._link.window * copy_s, max(0.0, copies * copy_s - computing_s))
        saved_s -= (1 - max(hope, kind.right.value)) * under_way_s
        cost_s = max(0.0, (kind.cost.value or 0.0) - self._pace.awaited_s()) if kind is self._best else 0.0
        if kind is self._none:
            reason = "steps without forecasts are faster"
        elif not missing * copy_s:
            reason = "nothing is missing"
        elif saved_s <= cost_s:
            reason = "it costs more than it saves"
        else:
            self._before[target] = self._prefetched(target)
        if reason:
            self._reasons[reason] += 1
        return None if reason else self.rung

    def made(self, target: int, number: int, seconds: float, *, compared: bool = False) -> None:
        """Count a rung's forecast for a layer, which took the model's thread so long, prefetching included; `compared`:
        the step has made or compared programs of early attention, and tells nothing about others."""
        rung = self._made[target] = self.rungs[number]
        self._new |= compared
        rung.made += 1
        if target not in rung.targets:
            rung.targets.add(target)
            self._first_s += max(0.0, seconds - (rung.cost.value or 0.0))
        elif not self._new:
            rung.cost.observe(max(seconds, 1e-9))

    def requested(self, layer: int, misses: int, found: int) -> None:
        """Count what a layer lacked when it requested its experts.

        Args:
            layer: MoE layer.
            misses: experts without a slot.
            found: experts that have a slot by a forecast, and are requested for the first time.
        """
        missing = misses + found
        self._lacking += missing
        self._missing.setdefault(layer, Share(missing, keep=1 - _MEMORY)).observe(missing)
        rung = self._made.get(layer)
        if rung is None:
            return
        copies = self._prefetched(layer) - self._before.get(layer, 0)
        rung.copies.observe(copies)
        rung.right.observe(min(found, copies), copies)
        if missing:
            rung.found.observe(found, missing)
            if self._hope is not None:
                self._hope.observe(found, missing)

    def _prefetched(self, layer: int) -> int:
        return self._residency.stats.layers[layer].prefetched

    # kinds of steps

    def end(self) -> None:
        """End the step: its last layer has been launched. Learn from it, and choose the kind of the next one."""
        seconds = max(self._link.clock() - self._start_s - self._first_s, 1e-9)
        demand_s, waited_s = self._lacking * self._link.copy_s, self._residency.waited_s - self._waited_s
        kind, best, tried = self._kind, self._best, self._kind is not self._best
        self._kind, kind.ran_s = best, self._seconds
        self._seconds += seconds
        if not kind.ran_s or self._new or not demand_s:  # caches are cold, programs are made, or forecasts save nothing
            return
        if not self._made and kind is not self._none:  # cost prevented all forecasts
            if tried:
                return
            kind = self._best = self._none
        counted = min(1.0, _OUTLIER * self._expected(kind, demand_s) / seconds) if best.own.weight else 1.0
        if tried:
            self._tried += 1
            self._lost_s = max(0.0, self._lost_s + counted * seconds - self._expected(best, demand_s))
            kind.own.limit(1.0)
            kind.waited.limit(demand_s)
        kind.own.observe(max(counted * (seconds - waited_s), 1e-9))
        kind.waited.observe(counted * waited_s, demand_s)
        best = self._best = min(self._best, kind, key=self._expected)
        losses = {own: self._expected(own) - self._expected(best) for own in self._kinds.values() if own is not best}
        other = min(losses, key=lambda own: (losses[own] > 0, own.ran_s))
        waits = self._seconds - other.ran_s < _PAUSE * seconds or self._lost_s + losses[other] > LOSS * self._seconds
        self._kind = best if tried or (waits and losses[other] > 0) else other
        if self._none.own.weight < 1.0:  # a step without forecasts tells early whether they are any good
            self._kind = self._none

    def _expected(self, kind: _Kind, demand_s: float = 0.0) -> float:
        """Return the expected seconds of a step of a kind, with a demand or with the usual one."""
        own_s, best = kind.own.value, self._best
        demand_s = demand_s or self._link.copy_s * sum(missing.value for missing in self._missing.values())
        if own_s is None:
            guess_s = 0.0 if kind is self._none else _DEARER * max(rung.cost.value or 0.0 for rung in self.rungs)
            price_s = (kind.cost.value or guess_s) - (best.cost.value or 0.0)
            own_s = (best.own.value or 0.0) + price_s * len(self._missing)
        return max(own_s, 1e-9) + kind.waited.value * demand_s

    def report(self) -> Json:
        """Return the choices so far, with counts, reasons and present estimates, as plain values.

        `rungs` by name: how many forecasts were `made`, their `cost_ms`, and the share of missing experts that they
        `found`; `left_out`, by reason, forecasts that were not made; `best`, the kind of most steps at present;
        `takes`, by kind that has run, the duration of its steps over those of the best kind; `trials`, steps of other
        kinds; `lost_s`, seconds that these lost, of `seconds` in all.
        """
        ran = [kind for kind in self._kinds.values() if kind.own.weight and kind is not self._best]
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
            "lost_s": self._lost_s,
            "seconds": self._seconds,
        }
