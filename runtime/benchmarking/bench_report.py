"""From recordings of a benchmark's runs to what it reports.

L MoE layers. A step is the forward of one token; its times are split by MoE layer, and what follows the last one
counts to layer L. All figures are of decode steps, the prefill left out.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from dataclasses import dataclass, field

from expertcast.predictors.plain import Json
from expertcast.runtime.benchmarking.decoding import Decoding, same_logits
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.recording.recorder import Recorder


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
    def tpot_s(self) -> float:
        """Time per output token: the median step."""
        return statistics.median(self.steps_s)


def step_times(recorder: Recorder, layers: int) -> list[StepTimes]:
    """The recorded steps; a copy counts to the step in which it began."""
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
    for copy in recorder.copies():
        number = bisect_right(starts, copy.start) - 1
        if number >= 0:
            steps[number].copy_L[copy.layer] += copy.seconds
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
    bytes_moved = sum(measured.link_bytes for measured in run.repetitions)
    busy_s = sum(measured.link_busy_s for measured in run.repetitions)
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
        "link_utilisation": bytes_moved / busy_s / link_rate if busy_s and link_rate else None,
        **_against(run, on_demand),
        "identical": all(
            len(decoding.logits) == len(truth.logits) and same_logits(decoding, truth) for decoding in decodings
        ),
        "same_tokens": all(decoding.tokens == truth.tokens for decoding in decodings),
        "stats": last.stats,
    }


def _against(run: Run, on_demand: Run | None) -> dict[str, float | None]:
    """Overlap efficiency and the bound, from the on-demand run's own measurement; medians as TPOT is one.
    None where there is nothing to compare with.

    The first `ahead` layers have no forecast, at most their last token's experts: the efficiency over all layers counts
    them in, the one over the layers that have a forecast leaves them out.
    """
    hideable_s, forecast_s, bound_s, gained_s = None, None, None, None
    if on_demand is not None:
        steps = on_demand.steps
        hideable_s = statistics.median(step.hideable() for step in steps)
        forecast_s = statistics.median(step.hideable(run.config.ahead) for step in steps)
        parts = zip(*((sum(step.compute_L), sum(step.copy_L)) for step in steps), strict=True)
        bound_s = max(map(statistics.median, parts))  # no schedule is faster than computing, or copying, it all
        gained_s = on_demand.tpot_s - run.tpot_s if run is not on_demand else None
    return {
        "overlap_efficiency": _ratio(gained_s, hideable_s),
        "overlap_efficiency_forecast_layers": _ratio(gained_s, forecast_s),
        "hideable_s": hideable_s,
        "bound_s": bound_s,
        "tpot_over_bound": _ratio(run.tpot_s, bound_s),
    }


def _ratio(value: float | None, of: float | None) -> float | None:
    return value / of if value is not None and of else None
