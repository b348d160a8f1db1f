"""Observers of an offloaded run, a recorder of the time spans of its compute stream and its link, and statistics.

The runtime reports each change of state (`enter`); a state lasts until the next one. On the CPU the states are those of
the thread that runs the model. On CUDA they are those of the compute stream, measured by events; `policy` is then time
in which the device waits for the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from inspect import isfunction
from typing import Literal

import torch
from torch import Tensor

from expertcast.data.machine import with_index
from expertcast.predictors.messages import Json

# Observers. Engine, cache and link call them and do not depend on what they do.
#
# T tokens, D hidden size, E routed experts per layer. The key of an expert is layer * E + expert.

State = Literal["compute", "forecast", "wait", "policy"]


class Observer:
    """Base class of observers; subclasses override the events that they need.

    All methods but :meth:`copied` are called by the thread that runs the model, in the order of events. Arguments
    belong to the runtime; copy what you keep.
    """

    def enter(self, state: State, layer: int) -> None:
        """The compute stream enters `state` at `layer`."""

    def routed(self, layer: int, residual_TD: Tensor, logits_TE: Tensor) -> None:
        """A router has run; policies have not changed its choice yet."""

    def needed(self, layer: int, keys: Sequence[int]) -> None:
        """A layer will execute these distinct experts, which are requested next."""

    def requested(self, layer: int, keys: Sequence[int]) -> None:
        """A forecast made for `layer` requests its experts, most needed first."""

    def copied(self, key: int, layer: int, start: float, end: float, urgent: bool) -> None:
        """A copy has finished.

        Args:
            key: key of the expert.
            layer: layer of the expert.
            start: start time in seconds of `time.perf_counter`, or of :meth:`device_time` on CUDA.
            end: time of arrival, on the same clock.
            urgent: whether a layer waited for the copy; false for copies of forecasts.
        """

    def expanded(self, key: int, seconds: float) -> None:
        """A copy of lower precision was expanded to full precision in `seconds` of the thread that runs the model."""

    def device_time(self, event: torch.cuda.Event) -> float:
        """Return the seconds of a finished CUDA event on this observer's clock; 0 without a clock."""
        return 0.0


class Observers(Observer):
    """Several observers, called in order.

    An event calls only the observers that override it, so an event with one listener costs one call.

    Args:
        observers: the observers.
    """

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = tuple(observers)
        for event in _EVENTS:
            methods = [getattr(observer, event) for observer in self._observers]
            listeners = [each for each in methods if getattr(each, "__func__", each) is not getattr(Observer, event)]
            if listeners:
                self.__dict__[event] = listeners[0] if len(listeners) == 1 else _call_all(listeners)

    def device_time(self, event: torch.cuda.Event) -> float:
        return max((observer.device_time(event) for observer in self._observers), default=0.0)


_EVENTS = [name for name, value in vars(Observer).items() if isfunction(value) and name != "device_time"]


def _call_all(listeners: Sequence[Callable[..., None]]) -> Callable[..., None]:
    def call(*args: object) -> None:
        for each in listeners:
            each(*args)

    return call


@dataclass(frozen=True, slots=True)
class Span:
    """One state of the compute stream, or one copy."""

    state: str
    """`compute`, `forecast`, `wait` (for copies), `policy` (host work of the runtime), or `copy`."""
    layer: int
    """MoE layer. Attention and router belong to the layer of the next experts; L after the last experts."""
    start: float
    """Start in seconds, on one clock for all spans of a recorder."""
    end: float
    """End in seconds."""
    step: int
    """Number of the step since the recording began; -1 for copies."""

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.end - self.start


class Recorder(Observer):
    """Observer that records the spans of one offloaded run; pass it to :func:`expertcast.offload` in `observers`.

    The caller of the model marks steps by :meth:`step_start` and :meth:`step_end`; time between steps is not recorded.

    Args:
        device: device of the model.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = with_index(device)
        self._cuda = self._device.type == "cuda"
        self._marks: list[tuple[str, int, int, float | torch.cuda.Event]] = []
        self._copies: list[Span] = []
        self._step = -1
        self._origin: torch.cuda.Event | None = None

    def clear(self) -> None:
        """Delete all spans."""
        self._marks.clear()
        self._copies.clear()
        self._step = -1
        self._origin = None  # CUDA event times have single precision, which is accurate near their origin

    def step_start(self) -> None:
        """Mark the start of a step."""
        self._step += 1
        self.enter("compute", 0)

    def step_end(self) -> None:
        """Mark the end of a step, after its last kernels are launched."""
        self.enter("", -1)

    def enter(self, state: State | Literal[""], layer: int) -> None:
        if self._cuda:
            self._base()
        self._marks.append((state, layer, self._step, self._event_now() if self._cuda else time.perf_counter()))

    def copied(self, key: int, layer: int, start: float, end: float, urgent: bool) -> None:
        self._copies.append(Span("copy", layer, start, end, -1))

    def device_time(self, event: torch.cuda.Event) -> float:
        return float(self._base().elapsed_time(event)) / 1e3

    def spans(self) -> Sequence[Span]:
        """Return the spans of the compute stream in order of time; this synchronises a CUDA device."""
        if self._cuda and self._marks:
            torch.cuda.synchronize(self._device)
        times = [self._seconds(mark[3]) for mark in self._marks]
        return [
            Span(state, layer, start, end, step)
            for (state, layer, step, _), start, end in zip(self._marks, times, times[1:], strict=False)
            if state
        ]

    def copies(self) -> Sequence[Span]:
        """Return the spans of copies in the order of their end."""
        return list(self._copies)

    def steps(self) -> list[tuple[float, float]]:
        """Return (start, end) of each step in seconds."""
        bounds: dict[int, tuple[float, float]] = {}
        for span in self.spans():
            start, _ = bounds.get(span.step, (span.start, span.end))
            bounds[span.step] = (start, span.end)
        return list(bounds.values())

    def _base(self) -> torch.cuda.Event:
        if self._origin is None:
            self._origin = self._event_now()
            self._origin.synchronize()  # type: ignore[no-untyped-call]
        return self._origin

    def _event_now(self) -> torch.cuda.Event:
        """Record an event on the compute stream of the recorder's device, which may not be the current device."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))  # type: ignore[no-untyped-call]
        return event

    def _seconds(self, when: float | torch.cuda.Event) -> float:
        return when if isinstance(when, float) else self.device_time(when)


# Statistics per MoE layer, and in total


@dataclass(slots=True)
class LayerStatistics:
    """Statistics of one MoE layer."""

    requests: int = 0
    """Number of distinct experts that the layer needed, summed over steps."""
    hits: int = 0
    """Requests of experts that had a slot when the routing was known, including copies in flight for a forecast."""
    misses: int = 0
    """Requests whose copy started after the routing was known, or without a forecast, as a prefill loads the next
    layer; without dropped and substituted experts."""
    on_host: int = 0
    """Misses that the host computed; see `misses` of :class:`expertcast.OffloadConfig`."""
    collisions: int = 0
    """Misses of experts that were evicted earlier in the same step."""
    evicted: int = 0
    """Number of evictions."""
    skipped: int = 0
    """Experts that the router chose and that a lossy policy dropped or substituted."""
    prefetched: int = 0
    """Copies requested by forecasts, without dropped ones."""
    prefetched_used: int = 0
    """Prefetched copies whose expert was requested before its eviction; each copy counts once."""
    prefetched_in_time: int = 0
    """Used prefetched copies that arrived before the layer waited for them."""
    dropped: int = 0
    """Copies requested by forecasts and cancelled before they started; not part of `prefetched`."""
    bytes_moved: int = 0
    """Bytes of this layer's experts copied from the store to slots."""
    waited_s: float = 0.0
    """Seconds that the layer waited for copies and for the host's experts (host time; on CUDA the streams wait on the
    device, see the link). Includes copies and disk reads by the thread that runs the model."""
    steps: int = 0
    """Number of times the layer ran."""
    chunks: int = 0
    """Number of kernel calls; exceeds `steps` if the experts of a step did not fit the slots."""


class RunStatistics:
    """Statistics of a run: `layers[l]` for layer l, `total` for all layers.

    Args:
        layers: number of MoE layers.
    """

    reports: Sequence[Callable[[], Json]] = ()
    """Functions that return further entries of :meth:`as_dict`."""
    resets: int = 0
    """Number of resets."""

    def __init__(self, layers: int) -> None:
        self.layers = [LayerStatistics() for _ in range(layers)]

    def reset(self) -> None:
        """Set all counts to 0."""
        self.layers[:] = [LayerStatistics() for _ in self.layers]
        self.resets += 1

    def __repr__(self) -> str:
        """The counts of all layers."""
        total = self.total
        return (
            f"RunStatistics(requests={total.requests}, hits={total.hits} ({self.hit_rate:.1%}), "
            f"misses={total.misses}, bytes_moved={total.bytes_moved}, waited_s={total.waited_s:.3g})"
        )

    @property
    def total(self) -> LayerStatistics:
        """Sum over all layers."""
        return LayerStatistics(
            **{f.name: sum(getattr(layer, f.name) for layer in self.layers) for f in fields(LayerStatistics)}
        )

    @property
    def waited_s(self) -> float:
        """Seconds that all layers waited for copies."""
        return sum(layer.waited_s for layer in self.layers)

    @property
    def hit_rate(self) -> float:
        """hits / requests; 0 without requests."""
        total = self.total
        return total.hits / total.requests if total.requests else 0.0

    @property
    def prefetch_precision(self) -> float | None:
        """prefetched_used / (prefetched + dropped): share of the requested copies that a layer used; None without any.

        Dropped copies count, because layers cancel queued copies of experts that they do not need; on a slow link these
        are most of the wrong forecasts. Forecast experts that were resident, or that got no slot, do not count.
        """
        total = self.total
        return share(total.prefetched_used, total.prefetched + total.dropped)

    @property
    def issued_precision(self) -> float | None:
        """prefetched_used / prefetched: share of the executed copies that a layer used; None without any."""
        total = self.total
        return share(total.prefetched_used, total.prefetched)

    def as_dict(self) -> Json:
        """Return all statistics as plain values.

        - the totals, `hit_rate`, `prefetch_precision`, `issued_precision`, and `per_layer`
        - `forecasts`: how many were made, by sequences; empty where no choice was made, as over the link `instant`
        """
        values = {
            **asdict(self.total),
            "hit_rate": self.hit_rate,
            "prefetch_precision": self.prefetch_precision,
            "issued_precision": self.issued_precision,
            "forecasts": {},
        }
        for report in self.reports:
            values |= report()
        return {**values, "per_layer": [asdict(layer) for layer in self.layers]}


def share(part: int, whole: int) -> float | None:
    """Return part / whole, or None if `whole` is 0."""
    return part / whole if whole else None
