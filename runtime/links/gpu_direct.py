"""The disk straight into the slots of a model on CUDA, by GPUDirect Storage: no host memory on the way.

A read is ordered by no stream: the thread that makes it first waits for the event behind the slot's last reader, and
compute is launched when the host has seen the read end. Tested with stand-ins for kvikio and the device, and never run
on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.links.base import Link
from expertcast.runtime.links.disk import DiskLink
from expertcast.runtime.links.driver import CudaDevice, ForwardOrder
from expertcast.runtime.links.exchange import Sent, Upload
from expertcast.runtime.storage.arrival import Reader
from expertcast.runtime.storage.direct_read import Read
from expertcast.runtime.storage.direct_reader import THREADS
from expertcast.runtime.storage.file_store import FileStore
from expertcast.runtime.storage.gpu_direct import GpuDirectReader, load_kvikio
from expertcast.runtime.storage.slots import SlotPool


class GpuDirectLink(DiskLink):
    """Reads a raw disk store's file into the slots of a model on CUDA.

    Args:
        threads: experts under way at a time.

    Raises:
        ExpertcastError: kvikio is not there.
    """

    name = "gpudirect"

    def __init__(self, threads: int = THREADS) -> None:
        super().__init__(threads)
        load_kvikio()

    def _reader_of(self, file: FileStore, pool: SlotPool) -> Reader:
        if not file.addressable:
            raise ExpertcastError("link 'gpudirect' reads experts as they are: give codec='raw', or link='disk'")
        assert self.driver is not None, "this link is for slots on a CUDA device"
        self._device: CudaDevice = self.driver
        self._order = ForwardOrder(self._device)
        self._upload = Upload(self._device, self._device.new_stream())
        self._read: dict[int, torch.cuda.Event] = {}
        """By the slot's address, behind the last kernels that read it."""
        self._zeroed = self._device.new_event()
        self._zeroed.record(self._device.current_stream())  # the pool was zeroed there
        return GpuDirectReader(file.path, self._threads, self._wait_for_slot)

    def _wait_for_slot(self, read: Read) -> None:
        self._read.get(read.target.data_ptr(), self._zeroed).synchronize()  # type: ignore[no-untyped-call]

    def twin(self) -> Link:
        return GpuDirectLink(self._threads)

    def follow(self) -> None:
        self._order.enter()

    def send(self, values: Sequence[int]) -> Sent:
        return self._upload.send(values)

    def mark_read(self, slots: list[int]) -> None:
        event = self._device.new_event()
        event.record(self._device.current_stream())
        for slot in slots:
            self._read[self._pool.block(slot).data_ptr()] = event
