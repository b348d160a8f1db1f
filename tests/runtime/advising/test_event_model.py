"""The event model against closed forms (row B11), against a clock that ticks, and against what a run counted."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
import torch
from transformers import PreTrainedModel

from expertcast.data.moe_layers import find_moe_layers
from expertcast.runtime.advising.survey import Watcher, executed
from expertcast.runtime.offloading import offload
from expertcast.runtime.recording.recorder import LayerTimes, Recorder
from expertcast.runtime.simulation.trace import Asked, Trace
from tests.runtime.made import Setting, calibrated, decoding, layer_times, perfect, record, replay, routings

LAYERS, EXPERTS, TOP_K, STEPS = 4, 6, 2, 5


def _trace(seed: int, layers: int = LAYERS, steps: int = STEPS) -> Trace:
    choose = random.Random(seed)

    def routing() -> list[list[int]]:
        return [[layer * EXPERTS + e for e in choose.sample(range(EXPERTS), TOP_K)] for layer in range(layers)]

    return decoding(routing(), [routing() for _ in range(steps)], experts=EXPERTS, top_k=TOP_K)


# ---- closed forms: no cache, every step alike


@pytest.mark.parametrize("copy_s", [0.01, 0.5, 1.0, 1.5, 4.0])
def test_on_demand_is_the_sum(copy_s: float) -> None:
    """B11: T_od = sum of compute and copy."""
    before, experts = [1.0, 0.25, 2.0, 0.5], [0.5, 1.0, 0.125, 3.0]
    times = layer_times(before, experts, request=0.0625, launch=0.125, tail=0.75)
    got = replay(_trace(0), times, Setting(slots=12, copy_s=copy_s, cache=False))
    own = sum(before) + sum(experts) + LAYERS * (0.0625 + 0.125) + 0.75
    # a copy starts when it is asked for, and what the thread does until it waits for it is hidden
    assert got.steps_s == pytest.approx([own + LAYERS * max(0.0, TOP_K * copy_s - 0.125)] * STEPS)
    assert got.wait_s == pytest.approx(LAYERS * max(0.0, TOP_K * copy_s - 0.125))
    assert got.hit_rate == 0.0
    assert got.copies == LAYERS * TOP_K


@pytest.mark.parametrize("copy_s", [0.01, 0.5, 0.75, 1.0, 4.0])
@pytest.mark.parametrize("forecast_s", [0.0, 0.375])
def test_perfect_prefetch_is_the_sum_of_the_larger(copy_s: float, forecast_s: float) -> None:
    """B11: T_pf = sum of max(compute, copy of the next layer), the first copy exposed and the last dropped (trap 9)."""
    before, experts = [1.0, 0.25, 2.0, 0.5], [0.5, 1.0, 0.125, 3.0]
    trace = _trace(1)
    times = layer_times(before, experts, forecast=forecast_s, tail=0.75)
    got = replay(trace, times, Setting(slots=12, copy_s=copy_s, cache=False, carry=False), perfect(trace))
    copies = TOP_K * copy_s
    total = before[0] + max(copies, forecast_s) + experts[-1] + 0.75
    for layer in range(LAYERS - 1):
        cost = forecast_s if layer + 1 < LAYERS - 1 else 0.0  # nothing is forecast at the last layer
        # the next layer's copies go out when this layer's forecast is there, or behind this layer's own copies
        link_starts_late = layer == 0 and forecast_s > copies
        assert not link_starts_late or copies <= experts[layer] + before[layer + 1] + cost
        total += max(experts[layer] + before[layer + 1] + cost, copies)
    assert got.steps_s == pytest.approx([total] * STEPS)
    assert got.copies == LAYERS * TOP_K


@pytest.mark.parametrize("copy_s", [0.01, 0.5, 1.0, 4.0])
def test_carried_over_from_token_to_token(copy_s: float) -> None:
    """Where each token needs what the last one needed, the first layer's copies are prefetched like all others."""
    before, experts = [1.0, 0.25, 2.0, 0.5], [0.5, 1.0, 0.125, 3.0]
    routing = _trace(1).forwards[0].keys
    trace = decoding(routing, [routing] * STEPS, experts=EXPERTS, top_k=TOP_K)
    times = layer_times(before, experts, tail=0.75)
    got = replay(trace, times, Setting(slots=12, copy_s=copy_s, cache=False), perfect(trace))
    after = [*before[1:], 0.75 + before[0]]
    total = sum(max(own + following, TOP_K * copy_s) for own, following in zip(experts, after, strict=True))
    assert got.steps_s[2:] == pytest.approx([total] * (STEPS - 2))
    assert got.hit_rate == 1.0


def test_everything_fits() -> None:
    trace = _trace(2)
    whole = [list(range(EXPERTS * n, EXPERTS * (n + 1))) for n in range(LAYERS)]
    every = decoding(whole, routings(trace), experts=EXPERTS, top_k=TOP_K)
    got = replay(every, layer_times([1.0] * LAYERS, [2.0] * LAYERS), Setting(slots=LAYERS * EXPERTS, copy_s=9.0))
    assert got.steps_s == [3.0 * LAYERS] * STEPS
    assert (got.hit_rate, got.copies) == (1.0, 0.0)


def test_link_in_the_models_own_thread_hides_nothing() -> None:
    trace = _trace(3)
    times = layer_times([1.0] * LAYERS, [2.0] * LAYERS)
    setting = Setting(slots=12, copy_s=0.5, cache=False, blocking=True, carry=False)
    own = LAYERS * (3.0 + TOP_K * 0.5)
    assert replay(trace, times, setting).steps_s == pytest.approx([own] * STEPS)
    assert replay(trace, times, setting, perfect(trace)).steps_s == pytest.approx([own] * STEPS)


def test_speculative_routing_is_what_was_forecast() -> None:
    trace, other = _trace(4), _trace(5)
    forecasts = perfect(other)
    times = layer_times([1.0] * LAYERS, [2.0] * LAYERS)
    setting = Setting(slots=12, copy_s=1.0, cache=False, carry=False)
    got = replay(executed(trace, forecasts, range(LAYERS)), times, setting, forecasts)
    assert got.hit_rate == (LAYERS - 1) / LAYERS
    assert got.copies == LAYERS * TOP_K
    assert got.steps_s == pytest.approx(replay(trace, times, setting, perfect(trace)).steps_s)


def test_calibrated_to_the_run_it_comes_from() -> None:
    trace = _trace(6)
    times = layer_times([1.0] * LAYERS, [2.0] * LAYERS, tail=0.5)
    setting = Setting(slots=12, copy_s=0.5, cache=False)
    own = replay(trace, times, setting).tpot_s
    slower = calibrated(own + 2.25, trace, times, setting)
    assert slower.late_s == 2.25
    assert slower.compute_s == times.compute_s
    assert replay(trace, slower, setting).tpot_s == own + 2.25
    assert calibrated(own - 1.0, trace, times, setting).late_s == -1.0


# ---- a clock that ticks: independent of the books that the event model borrows


class _Ticking:
    """The runtime with room for every expert, in whole ticks, by its rules as written down in the documentation."""

    def __init__(self, copy: int, *, cache: bool) -> None:
        self.copy, self.cache = copy, cache
        self.time, self.copies, self.hits, self.requests = 0, 0, 0, 0
        self.resident: set[int] = set()
        self.moving: tuple[int, int] | None = None  # key, when it arrives
        self.urgent: list[int] = []
        self.forecast: list[int] = []
        self.wanted: dict[int, set[int]] = {}

    def tick(self) -> None:
        self.time += 1
        self.link()

    def link(self) -> None:
        if self.moving is not None and self.moving[1] <= self.time:
            self.resident.add(self.moving[0])
            self.moving = None
        if self.moving is None and (self.urgent or self.forecast):
            queue = self.urgent or self.forecast
            self.moving = (queue.pop(0), self.time + self.copy)
            self.copies += 1

    def work(self, ticks: int) -> None:
        for _ in range(ticks):
            self.tick()

    def here(self) -> set[int]:
        return self.resident | set(self.urgent) | set(self.forecast) | ({self.moving[0]} if self.moving else set())

    def forget(self) -> None:
        if not self.cache:
            self.resident &= set().union(*self.wanted.values())

    def step(
        self, routing: Sequence[Sequence[int]], forecasts: Mapping[int, Sequence[int]], times: Mapping[str, list[int]]
    ) -> int:
        start = self.time
        for layer, keys in enumerate(routing):
            self.work(times["before"][layer])
            self.settle(layer, list(keys))
            self.link()
            if layer + 1 in forecasts:
                self.work(times["forecast"][layer])
                self.ask(layer + 1, forecasts[layer + 1])
                self.link()
            elif layer + 1 == len(routing) and not self.cache:  # for the next token
                self.work(times["forecast"][layer])
                self.ask(0, routing[0])
                self.link()
            while not set(keys) <= self.resident:
                self.tick()
            self.work(times["experts"][layer])
            if not self.cache:
                self.resident -= set(keys)
        return self.time - start

    def settle(self, layer: int, keys: list[int]) -> None:
        own = self.wanted.pop(layer, set())
        self.forecast = [key for key in self.forecast if key in keys or key not in own]
        self.wanted[layer] = set(keys)
        self.forget()
        del self.wanted[layer]
        self.requests += len(keys)
        self.hits += len(set(keys) & self.here())
        promoted = [key for key in self.forecast if key in keys]
        self.forecast = [key for key in self.forecast if key not in keys]
        missing = [key for key in keys if key not in self.here() and key not in promoted]
        self.urgent += [*promoted, *missing]

    def ask(self, layer: int, keys: Sequence[int]) -> None:
        self.wanted[layer] = set(keys)
        self.forecast += [key for key in keys if key not in self.here()]


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_against_a_ticking_clock(seed: int, cache: bool) -> None:
    choose = random.Random(seed)
    layers = 3
    trace = _trace(seed, layers, steps=4)
    forecasts = [
        {layer: [layer * EXPERTS + e for e in choose.sample(range(EXPERTS), TOP_K)] for layer in (1, 2)}
        if choose.random() < 0.5
        else {layer: routing[layer] for layer in (1, 2)}
        for routing in routings(trace)
    ]
    ticks = {part: [choose.randint(1, 6) for _ in range(layers)] for part in ("before", "forecast", "experts")}
    copy = choose.randint(1, 5)
    slow = _Ticking(copy, cache=cache)
    nothing = {part: [0] * layers for part in ticks}
    slow.step(trace.forwards[0].keys, {}, nothing)
    slow.hits = slow.requests = 0
    expected = [slow.step(*pair, ticks) for pair in zip(routings(trace), forecasts, strict=True)]
    zeros = [0.0] * layers
    times = LayerTimes(
        before_s=[float(value) for value in ticks["before"]],
        request_s=zeros,
        forecast_s=[float(value) for value in ticks["forecast"]],
        prefetch_s=zeros,
        launch_s=zeros,
        experts_s=[float(value) for value in ticks["experts"]],
        tail_s=0.0,
    )
    setting = Setting(slots=layers * EXPERTS, copy_s=float(copy), cache=cache)
    got = replay(trace, times, setting, Asked(steps=forecasts))
    assert got.steps_s == expected
    assert got.hit_rate == slow.hits / slow.requests


# ---- the cache: what a real run counted


@pytest.mark.parametrize("slots", [56, 200])
def test_replay_counts_what_the_run_counted(reference_model: PreTrainedModel, slots: int) -> None:
    """On demand, what is evicted does not depend on times; 56 slots make the prefill run in chunks."""
    ids = torch.arange(3, 4000, 9)[None]  # tokens of all kinds: more experts than slots in every layer
    recorder, watched = Recorder(), Watcher()
    with offload(reference_model, slots=slots, observers=[recorder, watched]) as offloaded:
        record(offloaded, ids, 8, recorder)
        stats = offloaded.stats.as_dict()
    trace = watched.trace(find_moe_layers(reference_model).shape)
    chunked = max(map(len, trace.forwards[0].keys)) > slots
    assert chunked == (slots == 56)
    times = layer_times([1.0] * 12, [1.0] * 12)
    got = replay(trace, times, Setting(slots=slots, copy_s=0.1))
    assert got.hit_rate == stats["hit_rate"]
    assert got.copies * 7 * 36864 == pytest.approx(stats["bytes_moved"])
    assert 0 < got.hit_rate < 1
