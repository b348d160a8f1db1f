"""The simulated device follows CUDA's rules; expected times are computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from benchmarks.timed.costs import DriverCosts
from benchmarks.timed.device import TimedDevice, TimedStream

FREE = DriverCosts(
    record_s=0, wait_s=0, query_s=0, copy_call_s=0, wake_s=0, launch_s=0, stream_entry_s=0, copy_setup_s=0
)
"""Costs of zero for everything but kernels and bytes."""


@pytest.fixture
def device() -> TimedDevice:
    """Return a device that copies 100 bytes per second."""
    return TimedDevice(100.0, FREE)


def copy(device: TimedDevice, size: int, stream: TimedStream, fill: int = 1) -> torch.Tensor:
    source = torch.full((size,), fill, dtype=torch.uint8)
    target = torch.zeros(size, dtype=torch.uint8)
    device.to_device(target, source, stream)
    return target


def spans(device: TimedDevice) -> list[tuple[str, float, float]]:
    return [(span.name, span.start, span.end) for span in device.spans]


def test_a_stream_runs_in_order_and_the_host_goes_on(device: TimedDevice) -> None:
    device.launch(2.0, name="a")
    device.spend(1.0)
    device.launch(3.0, name="b")
    assert device.now == 1.0
    device.synchronize()
    assert device.now == 5.0
    assert device.host_busy_s == 1.0
    assert spans(device) == [("a", 0.0, 2.0), ("b", 2.0, 5.0)]


def test_streams_run_side_by_side_and_wait_for_events(device: TimedDevice) -> None:
    other, event = device.new_stream(), device.new_event()
    device.launch(2.0, name="a")
    event.record()
    device.launch(2.0, name="b")
    device.launch(1.0, name="c", stream=other)
    other.wait_event(event)
    device.launch(1.0, name="d", stream=other)
    event.record()  # the other stream waits for the earlier record
    device.synchronize()
    assert sorted(spans(device)) == [("a", 0.0, 2.0), ("b", 2.0, 4.0), ("c", 0.0, 1.0), ("d", 2.0, 3.0)]


def test_events_answer_and_time(device: TimedDevice) -> None:
    begun, end = device.new_event(timing=True), device.new_event(timing=True)
    begun.record()
    device.launch(2.0)
    end.record()
    assert not end.query()
    device.spend(1.5)
    assert not end.query()
    end.synchronize()
    assert device.now == 2.0
    assert end.query()
    assert begun.elapsed_time(end) == 2000.0


def test_one_copy_at_a_time_in_each_direction(device: TimedDevice) -> None:
    one, two = device.new_stream(), device.new_stream()
    assert copy(device, 100, one).all()
    copy(device, 200, two)
    device.to_host(torch.ones(300, dtype=torch.uint8), two)
    device.launch(1.5, name="kernel")
    device.synchronize()
    assert sorted(spans(device)) == [
        ("kernel", 0.0, 1.5), ("to_device", 0.0, 1.0), ("to_device", 1.0, 3.0), ("to_host", 3.0, 6.0)
    ]  # fmt: skip


def test_a_small_copy_waits_behind_what_another_stream_has_queued(device: TimedDevice) -> None:
    large, other = device.new_stream(), device.new_stream()
    for _ in range(3):
        copy(device, 100, large)
    copy(device, 1, other)
    device.synchronize()
    assert [span.start for span in device.spans if span.size == 1] == [3.0]


def test_an_engine_does_not_stay_with_a_stream_that_waits(device: TimedDevice) -> None:
    large, other, event = device.new_stream(), device.new_stream(), device.new_event()
    device.launch(10.0)
    event.record()
    copy(device, 100, large)
    large.wait_event(event)
    copy(device, 100, large)
    copy(device, 1, other)
    device.synchronize()
    assert [span.start for span in device.spans if span.size == 1] == [1.0]


def test_copies_to_scaled_addresses_stand_for_more(device: TimedDevice) -> None:
    target = torch.zeros(100, dtype=torch.uint8)
    device.scale(range(target.data_ptr(), target.data_ptr() + 100), 5.0)
    device.to_device(target[:10], torch.ones(10, dtype=torch.uint8), device.compute)
    device.synchronize()
    assert spans(device) == [("to_device", 0.0, 0.5)]


def test_what_reads_too_early_is_a_race(device: TimedDevice) -> None:
    copies, event = device.new_stream(), device.new_event()
    target = copy(device, 100, copies)
    event.record(copies)
    device.compute.wait_event(event)
    device.launch(1.0, reads=[target.data_ptr()])
    device.synchronize()
    assert not device.races
    device.to_device(target, torch.zeros(100, dtype=torch.uint8), copies)
    device.launch(1.0, reads=[target.data_ptr()], name="early")
    device.synchronize()
    assert [race.split()[0] for race in device.races] == ["early"]


def test_what_overwrites_too_early_is_one_too(device: TimedDevice) -> None:
    copies = device.new_stream()
    target = torch.zeros(100, dtype=torch.uint8)
    device.launch(1.0, reads=[target.data_ptr()])
    device.to_device(target, torch.zeros(100, dtype=torch.uint8), copies)
    device.synchronize()
    assert [race.split()[0] for race in device.races] == ["to_device"]


def test_every_cost_counts_where_it_says() -> None:
    """One call of each kind."""
    costs = replace(FREE, record_s=1, wait_s=2, query_s=4, copy_call_s=8, wake_s=16, launch_s=32)
    device = TimedDevice(100.0, costs)
    event = device.new_event()
    event.record()  # until 1, seen at 33
    device.compute.wait_event(event)  # until 3
    copy(device, 100, device.compute)  # until 11, seen at 43, over at 44
    assert not event.query()  # until 15
    device.synchronize()
    assert device.now == 44 + 16
    entries = replace(FREE, stream_entry_s=1, copy_setup_s=10)
    device = TimedDevice(100.0, entries)
    event = device.new_event()
    event.record()
    device.compute.wait_event(event)
    copy(device, 100, device.compute)
    device.synchronize()
    assert device.now == 1 + 1 + 10 + 1


def test_the_host_may_work_while_it_waits(device: TimedDevice) -> None:
    event = device.new_event()
    device.launch(1.0)
    device.launch(1.0)
    event.record()
    looks: list[float] = []
    device.wait(event, lambda: looks.append(device.now))
    assert device.now == 2.0
    assert {0.0, 1.0} <= set(looks)
