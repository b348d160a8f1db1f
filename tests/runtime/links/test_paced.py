"""A CUDA link that is as slow as it is told to be: the time of copies, and their bytes."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from benchmarks.timed.costs import DriverCosts
from benchmarks.timed.device import TimedDevice

from expertcast.predictors import ExpertcastError
from expertcast.runtime.links.cuda import PacedCudaLink
from expertcast.runtime.links.driver import CudaDevice
from expertcast.runtime.links.speed import link_speed
from expertcast.runtime.storage.layout import BlockLayout, Field
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from tests.runtime.links.simulated_device import SimulatedDevice

BLOCK = 1 << 20
LAYOUT = BlockLayout(fields=(Field(name="w", shape=(BLOCK,), dtype=torch.uint8, offset=0),), block_bytes=BLOCK)
RATE = 50e9


class _Store:
    """Block k is filled with k."""

    addressable, layout, experts, nbytes = True, LAYOUT, 8, 8 * BLOCK

    def __init__(self) -> None:
        self._blocks = torch.arange(8, dtype=torch.uint8).repeat_interleave(BLOCK).view(8, BLOCK)

    def block(self, key: int) -> torch.Tensor:
        return self._blocks[key]


class _Link(PacedCudaLink):
    def __init__(self, driver: TimedDevice | SimulatedDevice, bandwidth: float | None, latency: float = 0.0) -> None:
        super().__init__(bandwidth, latency)
        self._stands_in = cast(CudaDevice, driver)

    def _device_of(self, pool: SlotPool) -> CudaDevice:
        return self._stands_in


def attached(link: PacedCudaLink) -> SlotPool:
    pool = SlotPool(LAYOUT, 4, torch.device("cpu"))
    link.attach(cast(ExpertStore, _Store()), pool)
    return pool


def copy_s(link: PacedCudaLink, count: int = 4) -> float:
    """Seconds of a copy among several."""
    for slot in range(count):
        link.submit(slot, slot, urgent=True)
    link.synchronize()
    return link.busy_s / count


@pytest.mark.parametrize(("bandwidth", "latency"), [(25e9, 0.0), (12e9, 0.0), (5e9, 0.0), (12e9, 1e-3), (None, 1e-3)])
def test_a_copy_takes_as_long_as_over_the_slower_link(bandwidth: float | None, latency: float) -> None:
    link = _Link(TimedDevice(RATE), bandwidth, latency)
    attached(link)
    expected = latency + BLOCK / (bandwidth or RATE)
    assert copy_s(link) == pytest.approx(expected, rel=0.15)  # the gaps between copies, which are no longer there
    assert link.bytes_moved == 4 * BLOCK


def test_speed_is_what_it_was_told() -> None:
    link = _Link(TimedDevice(RATE, DriverCosts(copy_setup_s=0.0)), 12e9, 1e-4)
    attached(link)
    speed = link_speed(link, cast(ExpertStore, _Store()))
    assert speed.rate == 12e9
    assert speed.copy_s == pytest.approx(1e-4 + BLOCK / 12e9)
    assert speed.latency_s == pytest.approx(1e-4, rel=0.1)


def test_blocks_arrive_whole() -> None:
    """Padding is written before the block, and nothing reads the slot meanwhile."""
    for seed in range(5):
        device = SimulatedDevice(seed)
        link = _Link(device, None)
        pool = attached(link)
        link.bandwidth, link.rate = 3.0, 10.0
        for slot, key in enumerate((7, 2, 5)):
            link.wait(link.submit(key, slot, urgent=True))
        device.synchronize()
        assert [pool.block(slot).unique().tolist() for slot in range(3)] == [[7], [2], [5]]


def test_a_faster_link_than_the_devices_own_is_refused() -> None:
    with pytest.raises(ExpertcastError, match="this device's link does"):
        attached(_Link(TimedDevice(RATE), 60e9))


@pytest.mark.parametrize(("bandwidth", "latency"), [(0.0, 0.0), (-1.0, 0.0), (float("nan"), 0.0), (None, -1.0)])
def test_bad_speeds_are_refused(bandwidth: float | None, latency: float) -> None:
    with pytest.raises(ExpertcastError, match="give"):
        PacedCudaLink(bandwidth, latency)
