"""What an offloaded run spends its time on: spans of the compute stream, and of the link.

The runtime says what it goes over to (`enter`); one state lasts until the next. On the CPU a state is what the model's
thread does. On CUDA it is what the stream does, from events: `policy` is then the time in which the device waits for
the host.
"""

from __future__ import annotations

import reprlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from inspect import isfunction
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

from expertcast.data.machine import with_index
from expertcast.predictors.messages import ExpertcastError

# Observers: engine, cache and link call them, and depend on nothing that they do.
#
# T tokens, D hidden size, E routed experts per layer. An expert's key is layer * E + expert.

State = Literal["compute", "forecast", "wait", "policy"]


class Observer:
    """Does nothing with all it is told; subclasses take what they are for.

    All calls but :meth:`copied` come from the thread that runs the model, in the order of events. What is handed over
    belongs to the runtime: copy what is to be kept.
    """

    def attached(self, experts: int) -> None:
        """An offload of a model with E routed experts per layer begins."""

    def enter(self, state: State, layer: int) -> None:
        """From here on the compute stream is in `state`, for `layer`."""

    def routed(self, layer: int, residual_TD: Tensor, logits_TE: Tensor) -> None:
        """A router has run; no policy has had its word."""

    def needed(self, layer: int, keys: Sequence[int]) -> None:
        """What a layer executes is known and about to be requested (distinct keys)."""

    def asked(self, layer: int, keys: Sequence[int]) -> None:
        """A forecast asks for experts of a later layer, most needed first; or the last layer, for the next token."""

    def copied(self, key: int, layer: int, start: float, end: float, urgent: bool) -> None:
        """A copy was under way.

        Args:
            key: the expert; -1 for a call of the device's own link, which moves several.
            layer: whose expert it is.
            start: when it began, by `time.perf_counter`, or by :meth:`device_time` on CUDA.
            end: when it had arrived.
            urgent: a layer was waiting for it, no forecast.
        """

    def expanded(self, key: int, seconds: float) -> None:
        """A copy in lower precision was expanded to the full block, in so many seconds of the model's thread."""

    def device_time(self, event: torch.cuda.Event) -> float:
        """Seconds of a finished CUDA event on this observer's clock; 0 where it keeps none."""
        del event
        return 0.0


def check_observers(given: object) -> None:
    """
    Raises:
        ExpertcastError: not a list of observers.
    """
    if not isinstance(given, Sequence) or not all(isinstance(each, Observer) for each in given):
        raise ExpertcastError(
            f"observers={reprlib.repr(given)}: give a list of Observer objects, such as [Recorder('cpu')]"
        )


class Observers(Observer):
    """Several at once, told in their order.

    An event goes straight to those that listen to it: to one of them it is a plain call, to none of them next to
    nothing.
    """

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = tuple(observers)
        for event in _EVENTS:
            hear = [hears for observer in self._observers if (hears := heard(observer, event)) is not None]
            if hear:
                self.__dict__[event] = hear[0] if len(hear) == 1 else _each(hear)

    def device_time(self, event: torch.cuda.Event) -> float:
        return max((observer.device_time(event) for observer in self._observers), default=0.0)


_EVENTS = [name for name, value in vars(Observer).items() if isfunction(value) and name != "device_time"]


def heard(observer: Observer, event: str) -> Callable[..., None] | None:
    """What is called for an event; None where nobody listens, so that a hot path need call nothing."""
    hears: Callable[..., None] = getattr(observer, event)
    return None if getattr(hears, "__func__", hears) is getattr(Observer, event) else hears


def _each(listening: Sequence[Callable[..., None]]) -> Callable[..., None]:
    def tell(*args: object) -> None:
        for hears in listening:
            hears(*args)

    return tell


@dataclass(frozen=True, slots=True)
class Span:
    """One state of the compute stream, or one copy.

    `layer` is the MoE layer it belongs to: attention and router count to the layer whose experts follow, what
    comes after the last experts to layer L.
    """

    state: str
    """`compute`, `forecast`, `wait` (for copies), `policy` (the runtime's own host work), or `copy`."""
    layer: int
    start: float
    end: float
    """Seconds on one clock for all spans of a recorder."""
    step: int
    """Forward since the recording began; -1 for copies."""
    urgent: bool = False
    """A copy that a layer was waiting for, no forecast's."""
    expert: int = -1
    """That a copy moved, as a number within its layer."""

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return self.end - self.start


class Recorder(Observer):
    """Collects spans of one offloaded run; give it to :func:`expertcast.offload` among `observers`.

    `step_start` and `step_end` come from whoever runs the forwards: time between two steps is nobody's.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._experts = 1
        self._device = with_index(device)
        self._cuda = self._device.type == "cuda"
        self._marks: list[tuple[str, int, int, float | torch.cuda.Event]] = []
        self._copies: list[Span] = []
        self._step = -1
        self._origin: torch.cuda.Event | None = None

    def clear(self) -> None:
        """Forget everything recorded so far."""
        self._marks.clear()
        self._copies.clear()
        self._step = -1
        self._origin = None  # CUDA's times are single precision: near their origin they are fine enough

    def step_start(self) -> None:
        """A forward starts."""
        self._step += 1
        self.enter("compute", 0)

    def step_end(self) -> None:
        """The forward's last kernels have been launched."""
        self._mark("", -1)

    def attached(self, experts: int) -> None:
        self._experts = experts

    def enter(self, state: State, layer: int) -> None:
        self._mark(state, layer)

    def copied(self, key: int, layer: int, start: float, end: float, urgent: bool) -> None:
        self._copies.append(Span("copy", layer, start, end, -1, urgent, key % self._experts))

    def device_time(self, event: torch.cuda.Event) -> float:
        return float(self._base().elapsed_time(event)) / 1e3

    def spans(self) -> Sequence[Span]:
        """Spans of the compute stream in order of time. Synchronises a CUDA device."""
        if self._cuda and self._marks:
            torch.cuda.synchronize(self._device)
        times = [self._seconds(mark[3]) for mark in self._marks]
        return [
            Span(state, layer, start, end, step)
            for (state, layer, step, _), start, end in zip(self._marks, times, times[1:], strict=False)
            if state
        ]

    def copies(self) -> Sequence[Span]:
        """Copies, in the order in which they ended."""
        return list(self._copies)

    def steps(self) -> list[tuple[float, float]]:
        """(start, end) of each forward."""
        bounds: dict[int, tuple[float, float]] = {}
        for span in self.spans():
            start, _ = bounds.get(span.step, (span.start, span.end))
            bounds[span.step] = (start, span.end)
        return list(bounds.values())

    def _mark(self, state: str, layer: int) -> None:
        if self._cuda:
            self._base()
        self._marks.append((state, layer, self._step, self._event_now() if self._cuda else time.perf_counter()))

    def _base(self) -> torch.cuda.Event:
        if self._origin is None:
            self._origin = self._event_now()
            self._origin.synchronize()  # type: ignore[no-untyped-call]
        return self._origin

    def _event_now(self) -> torch.cuda.Event:
        """Recorded on the compute stream of the recorder's device, which need not be the current one."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))  # type: ignore[no-untyped-call]
        return event

    def _seconds(self, when: float | torch.cuda.Event) -> float:
        return when if isinstance(when, float) else self.device_time(when)


# Times of each layer, from the spans of a recorded run.
#
# L MoE layers.


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
