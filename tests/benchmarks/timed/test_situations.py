"""Order and overlap of the real link and engine on a simulated CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import cast

import pytest
import torch
from benchmarks.timed.costs import StepCosts
from benchmarks.timed.device import Span, TimedDevice
from benchmarks.timed.links import TimedCudaLink
from benchmarks.timed.routing import RoutingTables
from benchmarks.timed.run import TimedCase, TimedRun, decode_timed

from expertcast.runtime.links.driver import CudaDevice, Readback
from expertcast.runtime.policies import Policies
from expertcast.runtime.storage.layout import BlockLayout, Field
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore

COPY_S = 171e-6
"""Seconds per copy of 9.4 MB at 55 GB/s."""
LAYERS, TOP_K = 6, 6
CASE = TimedCase(layers=LAYERS, warm_up=3, steps=3)


def copies(run: TimedRun) -> list[Span]:
    """Return the copies of experts in order."""
    return [span for span in run.spans if span.name == "to_device" and span.seconds > COPY_S / 2]


def idle_share(run: TimedRun) -> float:
    """Return the link's pauses between the first and the last copy of each token."""
    spans = copies(run)
    pauses = sorted(later.start - earlier.end for earlier, later in pairwise(spans))
    within = pauses[: -(CASE.steps - 1)]  # the longest pauses are between two tokens
    return sum(within) / (sum(within) + sum(span.seconds for span in spans))


SITUATIONS: dict[str, tuple[TimedCase, Callable[[TimedRun], bool]]] = {
    "perfect forecasts: nothing but the gap between two copies": (
        replace(CASE, accuracy=1.0),
        lambda run: idle_share(run) < 0.02,
    ),
    "nine of ten right: the same": (replace(CASE, accuracy=0.9), lambda run: idle_share(run) < 0.02),
    "misses only: idle while a layer is computed and the host is told, not longer": (
        CASE,
        lambda run: idle_share(run) * run.tpot_s < LAYERS * (CASE.step.layer_device_s + 150e-6),
    ),
    "all forecasts wrong: at most a window of useless copies a layer, and what the last token needed first": (
        replace(CASE, accuracy=0.0),
        lambda run: run.copies <= LAYERS * (TOP_K + 2) + TOP_K,
    ),
    "a host that is slower than device and link is all that is waited for": (
        replace(CASE, accuracy=1.0, capacity=1.0, step=StepCosts().with_host(2e-3), warm_up=8),
        lambda run: run.tpot_s < 1.02 * run.host_s,
    ),
    "a device that is slower than host and link is": (
        replace(CASE, accuracy=1.0, capacity=1.0, step=replace(StepCosts(), attention_device_s=3e-3), warm_up=8),
        lambda run: run.tpot_s - run.copies * COPY_S < LAYERS * (3.07e-3 + 200e-6) + 270e-6 + 800e-6,
    ),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_situation(name: str) -> None:
    case, holds = SITUATIONS[name]
    run = decode_timed(case)
    assert holds(run), (idle_share(run) if copies(run) else None, run.tpot_s, run.host_s, run.copies)
    assert not run.races


def test_auto_stops_forecasts_that_cost_more_than_they_save() -> None:
    """The host does not wait for a CUDA link's copies: what they cost is seen where it waits for the device."""
    case = replace(CASE, layers=12, bandwidth=12e9, capacity=0.25, warm_up=16, steps=48)
    on_demand = decode_timed(case).tpot_s
    wrong, right = (decode_timed(replace(case, accuracy=each, forecasts="auto")).tpot_s for each in (0.0, 1.0))
    assert wrong < 1.02 * on_demand
    assert right < 0.88 * on_demand


def test_forecasts_do_not_wait_for_the_layers_copies() -> None:
    """A forecast is computed, and its prefetches are queued, while this layer's copies are in flight."""
    run = decode_timed(replace(CASE, accuracy=1.0))
    begun = [span for span in run.spans if span.name == "forecast"]
    under_way = [any(copy.start < span.start < copy.end for copy in copies(run)) for span in begun]
    assert sum(under_way) > 0.8 * len(under_way)


def test_experts_run_as_soon_as_their_last_copy_is_there() -> None:
    """The slots' numbers arrive right after the copies, not after copies of other layers."""
    run = decode_timed(replace(CASE, accuracy=1.0))
    ends = [span.end for span in copies(run)]
    kernels = [span for span in run.spans if span.name == "experts"]
    first = [now for before, now in pairwise(kernels) if now.start - before.end > COPY_S]
    waited = [min(kernel.start - end for end in ends if end <= kernel.start) for kernel in first]
    assert first
    assert max(waited) < 20e-6


@pytest.mark.parametrize("capacity", [0.5, 0.1])
def test_a_prefill_loads_the_next_layer_while_this_one_computes(
    capacity: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With slots for a layer's experts, and in chunks: a layer's computation hides as many copies. A prompt of 200
    tokens needs nearly all experts; no recording has one."""
    ids_PLK = torch.rand(203, LAYERS, 128, generator=torch.Generator().manual_seed(0)).argsort(-1)[..., :TOP_K]
    tables = RoutingTables(ids_PLK=ids_PLK, forecast_NLK=ids_PLK[200:], prompt=200)
    monkeypatch.setattr("benchmarks.timed.run.recorded", lambda *_args, **_options: tables)
    case = replace(CASE, prompt=200, piece=200, capacity=capacity, warm_up=1, steps=1)
    without = decode_timed(replace(case, policies=Policies(prefetch="none")))
    streamed = decode_timed(case)
    hidden_s = without.seconds[0] - streamed.seconds[0]
    assert hidden_s > 0.6 * (LAYERS - 1) * case.step.layer_device_s
    assert not streamed.races


class TestLink:
    """The link alone, with a host that calls it and kernels that run for a while."""

    @pytest.fixture
    def device(self) -> TimedDevice:
        return TimedDevice(9437184 / COPY_S)

    @pytest.fixture
    def link(self, device: TimedDevice) -> TimedCudaLink:
        layout = BlockLayout(fields=(Field(name="w", shape=(64,), dtype=torch.uint8, offset=0),), block_bytes=64)
        link = TimedCudaLink(device, 9437184)
        link.attach(cast(ExpertStore, _Store(layout)), SlotPool(layout, 16, torch.device("cpu")))
        return link

    def test_urgent_copies_do_not_fill_the_window(self, link: TimedCudaLink) -> None:
        for slot in range(6):
            link.submit(slot, slot, urgent=True)
        forecasts = [link.submit(slot, slot, urgent=False) for slot in range(6, 10)]
        assert [copy.started for copy in forecasts] == [True, True, False, False]

    def test_a_wait_for_the_slots_readers_is_not_counted(self, link: TimedCudaLink, device: TimedDevice) -> None:
        """Copies take as long as they move bytes, behind another copy too."""
        device.launch(100 * COPY_S)
        link.mark_read([1])
        for slot in range(3):
            link.submit(slot, slot, urgent=True)
        link.synchronize()
        assert device.now > 100 * COPY_S
        assert link.busy_s == pytest.approx(3 * COPY_S, rel=0.1)

    def test_a_miss_waits_for_a_window_of_forecasts_at_most(self, link: TimedCudaLink, device: TimedDevice) -> None:
        for slot in range(8):
            link.submit(slot, slot, urgent=False)
        miss = link.submit(8, 8, urgent=True)
        start = device.now
        link.wait(miss)
        device.compute.synchronize()
        assert device.now - start < (link.window + 1) * 1.1 * COPY_S

    def test_copies_go_on_while_the_host_waits_for_values(self, link: TimedCudaLink, device: TimedDevice) -> None:
        forecasts = [link.submit(slot, slot, urgent=False) for slot in range(6)]
        device.launch(20 * COPY_S)
        readback = Readback(cast(CudaDevice, device), link.progress)
        assert readback.start(torch.tensor([3])).tolist() == [3]
        assert all(link.poll(copy) for copy in forecasts)

    def test_slot_numbers_go_before_the_next_layers_copies(self, link: TimedCudaLink, device: TimedDevice) -> None:
        for slot in range(3):
            link.submit(slot, slot, urgent=True)
        sent = link.send([0, 1, 2])
        for slot in range(3, 8):
            link.submit(slot, slot, urgent=False)
        start = device.now
        assert sent.take().tolist() == [0, 1, 2]
        device.compute.synchronize()
        assert device.now - start < 3.3 * COPY_S


class _Store:
    """Store of empty blocks."""

    addressable, layers, experts = True, 1, 128

    def __init__(self, layout: BlockLayout) -> None:
        self.layout, self._block = layout, torch.zeros(layout.block_bytes, dtype=torch.uint8)

    def block(self, key: int) -> torch.Tensor:
        del key
        return self._block
