"""The disk's link of a CUDA device on one that stands in; files and readers are the real ones."""

from __future__ import annotations

from typing import cast

from benchmarks.timed.device import TimedDevice

from expertcast.runtime.links.disk_cuda import CudaDiskLink
from expertcast.runtime.links.driver import CudaDevice
from expertcast.runtime.storage.slots import SlotPool
from tests.runtime.links.simulated_device import SimulatedDevice


class DiskOnDevice(CudaDiskLink):
    def __init__(self, device: SimulatedDevice | TimedDevice, places: int | None = None) -> None:
        super().__init__(places=places)
        self.device = device

    def _device_of(self, pool: SlotPool) -> CudaDevice:
        return cast(CudaDevice, self.device)
