"""From recordings of a benchmark's runs to what it reports.

L MoE layers. A step is the forward of one token; its times are split by MoE layer, and what follows the last one
counts to layer L. All figures are of decode steps, the prefill left out.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from dataclasses import dataclass, field

from expertcast.predictors.plain import Json
from expertcast.runtime.benchmarking.decoding import Decoding, same_logits
from expertcast.runtime.benchmarking.trust import Figure, Timing, figure
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.recording.recorder import Recorder

_RATE_ERROR = 0.025
"""Of a link's measured rate, at least."""


@dataclass(slots=True)
class StepTimes:
    """One decode step, in seconds."""

    compute_L: list[float]
    """Computing each layer, [L + 1], forecasts left out."""
    copy_L: list[float]
    """Copying experts of each layer, [L + 1]."""
    forecast: float = 0.0
    wait: float = 0.0
    idle: float = 0.0

    def hideable(self, first: int = 0) -> float:
        """What is hidden where each layer's copies run beside as much computation: sum of min(copy, compute)."""
        return sum(map(min, self.compute_L[first:], self.copy_L[first:]))


@dataclass(slots=True)
class Measured:
    """One repetition of one run."""

    decoding: Decoding
    stats: Json
    steps: list[StepTimes]
    link_bytes: int
    link_busy_s: float


@dataclass(slots=True)
class Run:
    """A way of running, with all its repetitions."""

    config: OffloadConfig
    repetitions: list[Measured] = field(default_factory=list)
    recorder: Recorder | None = None
    """Of the last repetition."""
    slots: int = 0

    @property
    def steps_s(self) -> list[float]:
        """Seconds of every decode step, over all repetitions."""
        return [seconds for measured in self.repetitions for seconds in measured.decoding.steps_s]

    @property
    def steps(self) -> list[StepTimes]:
        """What those seconds went into."""
        return [step for measured in self.repetitions for step in measured.steps]

    @property
    def timing(self) -> Timing:
        """Time per output token with its error."""
        return Timing.of([measured.decoding.steps_s for measured in self.repetitions])

    @property
    def tpot_s(self) -> float:
        """Time per output token: the median step."""
        return self.timing.value

    @property
    def bytes_per_step(self) -> float:
        """What the link moved in decode steps, prefills left out."""
        return float(sum(measured.stats["bytes_moved"] for measured in self.repetitions)) / len(self.steps)


def step_times(recorder: Recorder, layers: int) -> list[StepTimes]:
    """The recorded steps; a copy counts to the step in which it began, and moments in which several are made once."""
    starts = [start for start, _ in recorder.steps()]
    steps = [StepTimes([0.0] * (layers + 1), [0.0] * (layers + 1)) for _ in starts]
    for span in recorder.spans():
        step = steps[span.step]
        if span.state == "compute":
            step.compute_L[span.layer] += span.seconds
        elif span.state == "forecast":
            step.forecast += span.seconds
        elif span.state == "wait":
            step.wait += span.seconds
        else:
            step.idle += span.seconds
    until = 0.0
    for copy in sorted(recorder.copies(), key=lambda copy: copy.start):
        number = bisect_right(starts, copy.start) - 1
        if number >= 0:
            steps[number].copy_L[copy.layer] += max(0.0, copy.end - max(copy.start, until))
        until = max(until, copy.end)
    return steps


def report(run: Run, *, on_demand: Run | None, truth: Decoding, link_rate: float | None) -> Json:
    """What the benchmark says of one run.

    Args:
        run: with its repetitions.
        on_demand: the run without forecasts and with the same cache setting; None where there was none.
        truth: what every exact run must decode, bit for bit.
        link_rate: bytes per second of one large copy over the same link.
    """
    steps_s, tokens = run.steps_s, len(run.steps)
    quartiles = statistics.quantiles(steps_s, n=4) if len(steps_s) > 1 else [steps_s[0]] * 3
    last = run.repetitions[-1]
    decodings = [measured.decoding for measured in run.repetitions]
    busy_s = sum(measured.link_busy_s for measured in run.repetitions)
    used, against = _utilisation(run, link_rate), _against(run, on_demand)
    if used.reason is not None:
        against["not_given"]["link_utilisation"] = used.reason
    return {
        "tpot_s": run.tpot_s,
        "tpot_quartiles_s": [quartiles[0], quartiles[2]],
        "tpot_mean_s": statistics.fmean(steps_s),
        "ttft_s": statistics.median(decoding.ttft_s for decoding in decodings),
        "compute_s": sum(sum(step.compute_L) + step.forecast for step in run.steps) / tokens,
        "copy_s": sum(step.wait for step in run.steps) / tokens,
        "idle_s": sum(step.idle for step in run.steps) / tokens,
        "forecast_s": sum(step.forecast for step in run.steps) / tokens,
        "bytes_per_token": last.stats["bytes_moved"] / len(last.steps),
        "hit_rate": last.stats["hit_rate"],
        "waited_s_per_token": last.stats["waited_s"] / len(last.steps),
        "link_busy_s": busy_s / tokens,
        "link_utilisation": used.value,
        **against,
        "identical": all(
            len(decoding.logits) == len(truth.logits) and same_logits(decoding, truth) for decoding in decodings
        ),
        "same_tokens": all(decoding.tokens == truth.tokens for decoding in decodings),
        "stats": last.stats,
    }


def _utilisation(run: Run, link_rate: float | None) -> Figure:
    """Bytes per second while the link was busy, against one large copy's."""
    rates = [own.link_bytes / own.link_busy_s for own in run.repetitions if own.link_busy_s]
    if not rates or not link_rate:
        return Figure()
    busy_s = sum(own.link_busy_s for own in run.repetitions)
    bytes_moved = sum(own.link_bytes for own in run.repetitions)
    spread = statistics.stdev(rates) / math.sqrt(len(rates)) if len(rates) > 1 else 0.0
    error = max(spread / link_rate, _RATE_ERROR)
    return figure(bytes_moved / busy_s / link_rate, error, repetitions=len(run.repetitions), most=1.0)


def _against(run: Run, on_demand: Run | None) -> Json:
    """Overlap efficiency and the bound, from the on-demand run's own measurement; medians as TPOT is one. None where
    there is nothing to compare with, or where a figure cannot be believed: then `not_given` says why.

    The first `ahead` layers have no forecast, at most their last token's experts: the efficiency over all layers counts
    them in, the one over the layers that have a forecast leaves them out, and may be above 1 for what those gained.
    """
    names = ("overlap_efficiency", "overlap_efficiency_forecast_layers", "tpot_over_bound")
    if on_demand is None:
        return {**dict.fromkeys(("hideable_s", "bound_s", *names)), "not_given": {}}
    steps, own, other = on_demand.steps, run.timing, on_demand.timing
    compute_s = statistics.median(sum(step.compute_L) for step in steps)
    copy_s = statistics.median(sum(step.copy_L) for step in steps)
    less = min(1.0, run.bytes_per_step / on_demand.bytes_per_step) if on_demand.bytes_per_step else 1.0
    bound_s = max(compute_s, less * copy_s)  # no schedule is faster than computing it all, or copying what it copies
    repetitions = min(own.repetitions, other.repetitions)
    hideable_s = statistics.median(step.hideable() for step in steps)
    forecast_s = statistics.median(step.hideable(run.config.ahead) for step in steps)
    figures, error_s = dict.fromkeys(names, Figure()), math.hypot(own.error, other.error)
    if run is not on_demand:
        gained_s = other.value - own.value - (1 - less) * copy_s  # copying less is no overlap
        for name, of_s, most in zip(names, (hideable_s, forecast_s), (1.0, math.inf), strict=False):
            if of_s:
                figures[name] = figure(gained_s / of_s, error_s / of_s, repetitions=repetitions, most=most)
    if bound_s:
        figures[names[2]] = figure(own.value / bound_s, error_s / bound_s, repetitions=repetitions, least=1.0)
    return {
        "hideable_s": hideable_s,
        "bound_s": bound_s,
        **{name: found.value for name, found in figures.items()},
        "not_given": {name: found.reason for name, found in figures.items() if found.reason is not None},
    }
