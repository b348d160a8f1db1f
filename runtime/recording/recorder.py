"""What an offloaded run spends its time on: spans of the compute stream, and of the link.

The runtime says what it goes over to (`enter`); one state lasts until the next. On the CPU a state is what the model's
thread does. On CUDA it is what the stream does, from events: `policy` is then the time in which the device waits for
the host.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from expertcast.data.devices import with_index
from expertcast.runtime.recording.observer import Observer, State


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
    key: int = -1
    """Expert that a copy moved, layer * E + expert."""
    urgent: bool = False
    """A copy that a layer was waiting for, no forecast's."""
    expert: int = -1
    """The same as a number within its layer."""

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
        self._copies.append(Span("copy", layer, start, end, -1, key, urgent, key % self._experts))

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
