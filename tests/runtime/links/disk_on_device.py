"""The disk's link of a CUDA device on one that stands in; files and readers are the real ones."""

from __future__ import annotations

from expertcast.runtime.links.disk_cuda import CudaDiskLink
from expertcast.runtime.links.driver import CudaDevice


class DiskOnDevice(CudaDiskLink):
    def __init__(self, device: CudaDevice, places: int | None = None) -> None:
        super().__init__(places=places)
        self.driver = self.device = device
