"""The simulated disk behind a simulated CUDA device: overlap of reads, copies and computation, without races."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from benchmarks.timed.device import Span, TimedDevice
from benchmarks.timed.run import TimedCase, TimedRun, decode_timed

from expertcast.runtime.recording.recorder import Observer
from expertcast.runtime.storage.layout import BlockLayout, Field
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from tests.benchmarks.timed.timed_disk import TimedDiskLink

BLOCK = 9437184
COPY_S, READ_S = 171e-6, 3e-3
"""Seconds per expert of 9.4 MB: over PCIe 5, and from a disk of 3.1 GB/s."""
LAYOUT = BlockLayout(fields=(Field(name="w", shape=(64,), dtype=torch.uint8, offset=0),), block_bytes=64)
SLOTS = 16


class _Store:
    """Store whose block k is filled with k."""

    addressable, layers, experts, layout = True, 1, 128, LAYOUT

    def block(self, key: int) -> torch.Tensor:
        return torch.full((LAYOUT.block_bytes,), key, dtype=torch.uint8)


def attached(device: TimedDevice, *, read_s: float = READ_S, **options: Any) -> tuple[TimedDiskLink, SlotPool]:
    link, pool = TimedDiskLink(device, BLOCK, BLOCK / read_s, **options), SlotPool(LAYOUT, SLOTS, torch.device("cpu"))
    link.attach(cast(ExpertStore, _Store()), pool)
    return link, pool


@pytest.fixture
def device() -> TimedDevice:
    return TimedDevice(BLOCK / COPY_S)


def spans(device: TimedDevice, name: str) -> list[Span]:
    return [span for span in device.spans if span.name == name and span.seconds > COPY_S / 2]


def test_misses_take_the_disks_time_and_one_copy(device: TimedDevice) -> None:
    """Every copy but the last hides behind the next read; the disk always has a request."""
    link, pool = attached(device)
    copies = [link.submit(key, key, urgent=True) for key in range(8)]
    start = device.now
    for copy in copies:
        link.wait(copy)
    device.compute.synchronize()
    assert 8 * READ_S + COPY_S < device.now - start < 8.05 * READ_S + 1.1 * COPY_S
    assert [pool.block(slot).unique().tolist() for slot in range(8)] == [[key] for key in range(8)]
    link.synchronize()
    assert link.copies == 8
    assert link.copy_s == pytest.approx(READ_S, rel=0.05)
    reads, moved = spans(device, "read"), spans(device, "to_device")
    beside = [any(read.start < copy.start < copy.end < read.end for read in reads) for copy in moved]
    assert beside == [True] * 7 + [False]
    assert not device.races


def test_a_miss_waits_for_what_the_disk_has_begun_at_most(device: TimedDevice) -> None:
    """A miss goes first even if prefetches occupy every buffer; the displaced prefetch is read afterwards."""
    link, pool = attached(device)
    forecasts = [link.submit(key, key, urgent=False) for key in range(8)]
    miss = link.submit(100, 8, urgent=True)
    start = device.now
    link.wait(miss)
    device.compute.synchronize()
    assert device.now - start < 3.2 * READ_S
    for copy in forecasts:
        link.wait(copy)
    device.synchronize()
    assert [pool.block(slot).unique().tolist() for slot in range(9)] == [[key] for key in (*range(8), 100)]
    assert not device.races


@pytest.mark.parametrize("buffers", [2, 8])
def test_a_forecast_that_is_waited_for_comes_next(device: TimedDevice, buffers: int) -> None:
    """A miss runs after the started reads, with or without a buffer; then the others in order."""
    link, _ = attached(device, buffers=buffers, depth=1)
    forecasts = [link.submit(key, key, urgent=False) for key in range(6)]
    link.wait(forecasts[5])
    assert device.now < 2.2 * READ_S
    while not any(copy.done for copy in forecasts[1:5]):
        device.spend(READ_S / 10)
        link.progress()
    assert [copy.done for copy in forecasts] == [True, True, False, False, False, True]


def test_whoever_observes_sees_the_read_too(device: TimedDevice) -> None:
    link, seen = attached(device)[0], list[float]()
    link.observer = cast(Observer, SimpleNamespace(
        device_time=lambda event: event.made.time,
        copied=lambda _key, _layer, start, end, _urgent: seen.append(end - start),
    ))  # fmt: skip
    link.wait(link.submit(0, 0, urgent=True))
    link.synchronize()
    assert seen == [pytest.approx(READ_S + COPY_S, rel=0.05)]


def test_forecasts_arrive_while_the_device_computes(device: TimedDevice) -> None:
    """The host polls the link, as a model's thread does, without waiting for an expert."""
    link, _ = attached(device)
    forecasts = [link.submit(key, key, urgent=False) for key in range(8)]
    for _ in range(100):
        device.spend(READ_S / 10)
        device.launch(READ_S / 10)
        link.mark_read([SLOTS - 1])
    start = device.now
    assert all(link.poll(copy) for copy in forecasts)
    assert device.now - start < COPY_S


def _layers(device: TimedDevice, link: TimedDiskLink, pool: SlotPool) -> int:
    """Run layers of four experts and two prefetches each over few slots; return how often a slot had wrong bytes."""
    wrong = 0
    for layer in range(12):
        keys = [(4 * layer + index) % 60 for index in range(4)]
        copies = [link.submit(key, index, urgent=True) for index, key in enumerate(keys)]
        ahead = [link.submit(60 + 2 * layer + index, 4 + (2 * layer + index) % 8, urgent=False) for index in range(2)]
        for copy in copies:
            link.wait(copy)
        device.launch(20 * COPY_S, reads=[pool.block(slot).data_ptr() for slot in range(4)])
        link.mark_read(list(range(4)))
        wrong += sum(bool((pool.block(slot) != key).any()) for slot, key in enumerate(keys))
        for copy in ahead:
            link.wait(copy)
            wrong += bool((pool.block(copy.slot) != copy.key).any())
    device.synchronize()
    return wrong


@pytest.mark.parametrize("read_s", [READ_S, COPY_S / 4])
@pytest.mark.parametrize("buffers", [1, 2, 5])
def test_every_block_is_whole(device: TimedDevice, buffers: int, read_s: float) -> None:
    """With a disk slower than the device's link, and with a faster one, for which buffers are the bottleneck."""
    link, pool = attached(device, buffers=buffers, read_s=read_s, access_s=1e-6)
    assert _layers(device, link, pool) == 0
    assert not device.races


def decoded(disk: float, accuracy: float | None = None) -> TimedRun:
    """Decode with experts on a disk of so many bytes per second."""
    return decode_timed(replace(CASE, link=partial(TimedDiskLink, disk=disk), accuracy=accuracy))


CASE = TimedCase(layers=6, warm_up=3, steps=3)


def test_forecasts_hide_reads() -> None:
    """Correct forecasts keep disk, link and device busy at once, and the computation of a layer hides copies."""
    on_demand, forecast = decoded(6e9), decoded(6e9, accuracy=1.0)
    reads_s = forecast.copies * forecast.block_bytes / 6e9
    assert forecast.tpot_s < 1.05 * reads_s
    assert on_demand.tpot_s > reads_s + 0.8 * CASE.layers * CASE.step.layer_device_s
    assert not on_demand.races
    assert not forecast.races


def test_a_fast_disk_costs_little_more_than_memory() -> None:
    """Only the first read of each layer remains, which cannot be hidden."""
    memory, disk = decode_timed(replace(CASE, accuracy=1.0)), decoded(200e9, accuracy=1.0)
    assert memory.tpot_s < disk.tpot_s < 1.15 * memory.tpot_s
