"""Decode steps in virtual time: the runtime's own books over a link that only counts seconds.

What is requested, prefetched, dropped and evicted is decided by :class:`expertcast.runtime.residency.Residency` itself;
what passes is a clock. A layer of a decode step goes through the same events as in
:class:`expertcast.runtime.engine.Engine`:

    compute     | before | request | forecast | prefetch | launch | wait ... | experts |
    link                           [ miss ][ miss ][ forecast ][ forecast ] ...

L MoE layers, E routed experts per layer, K experts per token. An expert's key is layer * E + expert.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from expertcast.runtime.advising.layer_times import LayerTimes
from expertcast.runtime.cache import LRUPolicy
from expertcast.runtime.links import Copy, Link
from expertcast.runtime.residency import Residency
from expertcast.runtime.slots import SlotPool
from expertcast.runtime.statistics import RunStatistics
from expertcast.runtime.storage.layout import ALIGNMENT, BlockLayout, Field

Routing = Sequence[Sequence[int]]
"""[L] keys that each layer of one step needs, in the order in which the runtime asks for them."""
Forecasts = Mapping[int, Sequence[int]]
"""Keys wanted at a target layer, most needed first; layers without a forecast are left out."""

_UNIT = BlockLayout(
    fields=(Field(name="block", shape=(ALIGNMENT,), dtype=torch.uint8, offset=0),), block_bytes=ALIGNMENT
)


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


class VirtualLink(Link):
    """A link and the clock of the model's thread: one copy after another, misses before forecasts."""

    name = "virtual"

    def __init__(self, copy_s: float, *, window: int = 1, blocking: bool = False) -> None:
        super().__init__()
        self.now = 0.0
        self._copy_s, self._window, self._blocking = copy_s, window, blocking
        self._free_at = 0.0
        self._issued: deque[Copy] = deque()
        self._queued: deque[Copy] = deque()

    def submit(self, key: int, slot: int, *, urgent: bool) -> Copy:
        copy = Copy(key, slot, urgent)
        if not self._issued:
            self._free_at = max(self._free_at, self.now)
        (self._issued if urgent else self._queued).append(copy)
        self._issue()
        if self._blocking:
            self.wait(copy)
        return copy

    def promote(self, copy: Copy) -> None:
        if not copy.started and not copy.urgent:
            copy.urgent = copy.started = True
            self._queued.remove(copy)
            self._issued.append(copy)

    def cancel(self, copy: Copy) -> bool:
        if copy.started:
            return False
        copy.cancelled = True
        self._queued.remove(copy)
        return True

    def wait(self, copy: Copy) -> None:
        """Let time pass until the copy has arrived."""
        while not copy.done:
            self.run_until(max(self.now, self._free_at + self._copy_s))

    def read_ahead(self, keys: Sequence[int]) -> None:
        """There is no store."""

    def run_until(self, time: float) -> None:
        """The model's thread does something else until `time`; copies go on."""
        self.now = time
        while self._issued and self._free_at + self._copy_s <= time:
            self._free_at += self._copy_s
            self._issued.popleft().done = True
            self._issue()

    def spend(self, seconds: float) -> None:
        self.run_until(self.now + seconds)

    def _issue(self) -> None:
        while self._queued and len(self._issued) < self._window:
            self._issued.append(self._queued.popleft())
        for copy in self._issued:
            copy.started = True


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
    link = VirtualLink(setting.copy_s, window=setting.window, blocking=setting.blocking)
    pool = SlotPool(_UNIT, setting.slots, torch.device("cpu"))
    stats = RunStatistics(len(times.before_s))
    residency = Residency(pool, link, LRUPolicy(), stats, experts=trace.experts, keep=setting.cache)
    carried = ahead if forecasts is not None and setting.carry and not setting.cache else 0
    _prefill(residency, trace.prefill, carried)
    stats.reset()
    steps_s: list[float] = []
    waits_s: list[list[float]] = []
    for index, routing in enumerate(trace.steps):
        start = link.now
        made = {} if forecasts is None else forecasts[index]
        asked = [[made[layer + ahead]] if layer + ahead in made else [] for layer in range(len(routing))]
        asked[-1] += _carried(residency, routing, carried)
        visits = enumerate(zip(routing, asked, strict=True))
        waits_s.append([_layer(residency, link, times, layer, *keys) for layer, keys in visits])
        link.spend(times.tail_s)
        steps_s.append(link.now - start + times.late_s)
    copies = stats.total.bytes_moved / _UNIT.block_bytes / len(trace.steps)
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


def _carried(residency: Residency, routing: Routing, layers: int) -> list[Sequence[int]]:
    """What the engine asks for on behalf of the next token's first layers, which nothing comes early enough for."""
    return [keys for keys in routing[:layers] if len(keys) <= residency.pool.count // 2]


def _layer(
    residency: Residency,
    link: VirtualLink,
    times: LayerTimes,
    layer: int,
    keys: Sequence[int],
    asked: Sequence[Sequence[int]],
) -> float:
    """One layer of a decode step; returns the seconds that it waited."""
    link.spend(times.before_s[layer] + times.request_s[layer])
    residency.settle(layer, keys)
    residency.request(keys)
    if asked:
        link.spend(times.forecast_s[layer] + times.prefetch_s[layer])
    for wanted in asked:
        residency.prefetch(wanted)
    link.spend(times.launch_s[layer])
    start = link.now
    residency.wait(keys)
    waited = link.now - start
    link.spend(times.experts_s[layer])
    residency.release(keys)
    return waited


def _prefill(residency: Residency, routing: Routing, carried: int) -> None:
    """Leave the cache as a prefill does, in the chunks that the engine makes of a layer with too many experts."""
    for layer, keys in enumerate(routing):
        residency.settle(layer, keys)
        count = residency.pool.count
        chunks = [list(keys)]
        if len(keys) > count:
            ordered = sorted(keys, key=lambda key: (not residency.holds(key), key))
            size = max(1, count // 2)
            chunks = [ordered[start : start + size] for start in range(0, len(ordered), size)]
        residency.request(chunks[0])
        if layer == len(routing) - 1:
            for wanted in _carried(residency, routing, carried):
                residency.prefetch(wanted)
        for index, chunk in enumerate(chunks):
            if index + 1 < len(chunks):
                residency.request(chunks[index + 1])
            residency.wait(chunk)
            residency.release(chunk)
