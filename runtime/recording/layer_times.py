"""Each layer's own times, from the spans of a recorded run.

L MoE layers.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.recording.recorder import Recorder, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Medians over decode steps, in seconds, in the order in which they pass; each list has one entry per MoE layer."""

    before_s: list[float]
    """Attention and router, and whatever came before."""
    request_s: list[float]
    """The runtime's own work until the misses have been asked for."""
    forecast_s: list[float]
    """Making a forecast; 0 without a predictor."""
    prefetch_s: list[float]
    """The runtime's own work until the forecast's experts have been asked for."""
    launch_s: list[float]
    """From there to the wait for copies."""
    experts_s: list[float]
    """From the end of the wait until the layer's experts are done and given back."""
    tail_s: float
    """What follows the last MoE layer."""
    late_s: float = 0.0
    """Per step, what the run took beyond the event model's account of it, such as threads that wake up late."""

    @property
    def compute_s(self) -> list[float]:
        """[L] seconds of a layer that no copy has to be waited for; the tail counts to the last."""
        columns = (self.before_s, self.request_s, self.forecast_s, self.prefetch_s, self.launch_s, self.experts_s)
        layers = [sum(values) for values in zip(*columns, strict=True)]
        return [*layers[:-1], layers[-1] + self.tail_s]


def layer_times(recorder: Recorder) -> LayerTimes:
    """Each layer's own times from a recorded run: medians over its steps, waits for copies left out.

    Disturbances make a sum of medians smaller than the median of sums: all are stretched alike until they add up to the
    median step.

    Raises:
        ExpertcastError: nothing was recorded.
    """
    samples: dict[tuple[str, int], list[float]] = defaultdict(list)
    steps: dict[int, float] = defaultdict(float)
    for (step, layer), spans in groupby(recorder.spans(), key=lambda span: (span.step, span.layer)):
        for part, seconds in _parts(spans).items():
            samples[part, layer].append(seconds)
            steps[step] += seconds
    if not samples:
        raise ExpertcastError("nothing was recorded: offload(..., observers=[Recorder(device)]) and run decode steps")
    typical = {place: statistics.median(seconds) for place, seconds in samples.items()}
    stretch = statistics.median(steps.values()) / sum(typical.values())
    layers = max(layer for _, layer in samples)
    columns = {
        f"{part}_s": [stretch * typical.get((part, layer), 0.0) for layer in range(layers)]
        for part in ("before", "request", "forecast", "prefetch", "launch", "experts")
    }
    return LayerTimes(**columns, tail_s=stretch * typical["before", layers], late_s=0.0)


def _parts(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds of each of a layer's times, by the order of states that the engine goes through."""
    part, parts = "before", dict[str, float]()
    for span in spans:
        if span.state == "wait":
            part = "experts"
            continue
        if span.state == "forecast":
            part = "forecast"
        elif part == "before" and span.state == "policy":
            part = "request"
        elif part == "forecast" and span.state == "policy":
            part = "prefetch"
        elif part in ("request", "prefetch") and span.state == "compute":
            part = "launch"
        parts[part] = parts.get(part, 0.0) + span.seconds
    return parts
