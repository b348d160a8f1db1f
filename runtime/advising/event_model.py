"""Decode steps in virtual time, from what a run asked of its residency: what `advise` expects of other settings.

The flow and the books are the runtime's own, in :class:`expertcast.runtime.simulation.simulator.VirtualRuntime`; here
are the settings that `advise` compares, and forecasts as the keys that were asked for.

L MoE layers, E routed experts per layer, K experts per token. An expert's key is layer * E + expert.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from expertcast.predictors.view import ModelShape
from expertcast.runtime.links.virtual import VirtualLink
from expertcast.runtime.policies import Policies
from expertcast.runtime.recording.layer_times import LayerTimes
from expertcast.runtime.simulation.events import Forward, Routes, bare_view
from expertcast.runtime.simulation.events import Trace as RoutedTrace
from expertcast.runtime.simulation.simulator import VirtualRuntime

Routing = Sequence[Sequence[int]]
"""[L] keys that each layer of one step needs, in the order in which the runtime asks for them."""
Forecasts = Mapping[int, Sequence[int]]
"""Keys wanted at a target layer, most needed first; layers without a forecast are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The routing of one decoding."""

    experts: int
    """E"""
    prefill: Routing
    """What the prefill needed: it leaves the cache as the decode steps find it."""
    steps: Sequence[Routing]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How the runtime is set up."""

    slots: int
    copy_s: float
    """Seconds of one expert's copy."""
    cache: bool = True
    window: int = 1
    """Forecasts' copies that have been handed to the link and can no longer be overtaken."""
    blocking: bool = False
    """The link copies in the model's own thread (the instant link)."""
    carry: bool = True
    """Without a cache, what the first layers needed is asked for once more at the last layer, for the next token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a decoding takes in the event model."""

    steps_s: list[float]
    """Seconds of each step."""
    waits_s: list[list[float]]
    """[step][L] seconds that each layer waits for copies."""
    hit_rate: float
    copies: float
    """Per step."""

    @property
    def tpot_s(self) -> float:
        """Median over the steps, as the benchmark reports it."""
        return statistics.median(self.steps_s)

    @property
    def wait_s(self) -> float:
        """Seconds of waiting per step, median."""
        return statistics.median(map(sum, self.waits_s))


def replay(
    trace: Trace,
    times: LayerTimes,
    setting: Setting,
    forecasts: Sequence[Forecasts] | None = None,
    ahead: int = 1,
) -> Replay:
    """Run a recorded decoding in virtual time.

    Args:
        forecasts: per step what is asked for `ahead` layers before it is needed; None loads on demand. The costs of
            making forecasts are those in `times`, at layers that make one.
    """
    runtime = _AskedRuntime(trace, times, setting, 0 if forecasts is None else ahead)
    runtime.prefill(trace.prefill)
    runtime.residency.stats.reset()
    steps_s: list[float] = []
    waits_s: list[list[float]] = []
    for index, routing in enumerate(trace.steps):
        before_s = [layer.waited_s for layer in runtime.residency.stats.layers]
        runtime.asked = {} if forecasts is None else forecasts[index]
        steps_s.append(runtime.run(_forward(routing)))
        after_s = [layer.waited_s for layer in runtime.residency.stats.layers]
        waits_s.append([after - before for after, before in zip(after_s, before_s, strict=True)])
    stats = runtime.residency.stats
    copies = stats.total.bytes_moved / len(trace.steps)  # an expert is a byte here
    return Replay(steps_s=steps_s, waits_s=waits_s, hit_rate=stats.hit_rate, copies=copies)


def calibrated(
    tpot_s: float,
    trace: Trace,
    times: LayerTimes,
    setting: Setting,
    forecasts: Sequence[Forecasts] | None = None,
    ahead: int = 1,
) -> LayerTimes:
    """The same times with `late_s` such that a replay of the run they come from takes what the run took, `tpot_s`."""
    return replace(times, late_s=tpot_s - replay(trace, times, setting, forecasts, ahead).tpot_s)


class _AskedRuntime(VirtualRuntime):
    """Forecasts are the keys that a run asked for, in its order.

    Args:
        ahead: layers between a forecast and its target; 0 without forecasts.
    """

    def __init__(self, trace: Trace, times: LayerTimes, setting: Setting, ahead: int) -> None:
        carries = setting.carry and not setting.cache
        super().__init__(
            _without_routes(trace, len(times.before_s)), Policies(), setting.slots,
            VirtualLink(setting.copy_s, window=setting.window, blocking=setting.blocking), times,
            keep=setting.cache, carry=ahead if carries else 0,
        )  # fmt: skip
        self.asked: Forecasts = {}
        self._ahead = ahead
        self._asks_at = len(times.before_s) - 1 if ahead and carries else -1
        """The layer that asks on behalf of the next token."""

    def prefill(self, routing: Routing) -> None:
        """Leave the cache as a prefill does; its time does not count."""
        self.flow.start_pass(True)
        for layer, keys in enumerate(routing):
            chunks = self.flow.begin(layer, list(keys))
            self.flow.finish(layer)
            for index, chunk in enumerate(chunks):
                if index + 1 < len(chunks):
                    self.residency.request(chunks[index + 1])
                self.residency.wait(chunk)
                self.residency.release(chunk)

    def _hint(self, layer: int, forward: Forward) -> None:
        target = layer + self._ahead
        if target not in self.asked and layer != self._asks_at:
            return
        self.link.spend(self.times.forecast_s[layer] + self.times.prefetch_s[layer])
        self.residency.prefetch(self.asked.get(target, ()))


def _forward(routing: Routing) -> Forward:
    return Forward(fresh=False, sequences=1, rows=slice(0), keys=[list(keys) for keys in routing])


def _without_routes(trace: Trace, layers: int) -> RoutedTrace:
    """A trace of which only the shape is known: all that lru and plain requests look at."""
    shape = ModelShape(layers=layers, experts=trace.experts, top_k=len(trace.steps[0][0]), hidden=0)
    routes = Routes(view=bare_view(shape), logits=[], ids=[], weights=[], residual=[])
    return RoutedTrace(shape=shape, forwards=[], routes=routes)
