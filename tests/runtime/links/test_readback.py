"""Values read back are those that the producing stream wrote, whatever else runs meanwhile."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from expertcast.runtime.links.driver import CudaDevice, Pending, Readback, Sent, Upload
from tests.runtime.links.simulated_device import SimulatedDevice


def _simulated(seed: int = 0) -> tuple[Readback, SimulatedDevice]:
    readback, device = Readback(None), SimulatedDevice(seed)
    readback._open(cast(CudaDevice, device))
    return readback, device


def _produced(device: SimulatedDevice, values: Tensor) -> Tensor:
    """A tensor that the compute stream fills some time later."""
    made = torch.full_like(values, -1)
    device.compute.push(lambda: made.copy_(values))
    return made


def test_on_the_cpu_values_come_at_once() -> None:
    ids_TK = torch.tensor([[3, 1], [0, 2]])
    assert Readback(None).start(ids_TK).tolist() == [[3, 1], [0, 2]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_copy_waits_for_the_stream_that_makes_the_tensor(dtype: torch.dtype) -> None:
    for seed in range(20):
        readback, device = _simulated(seed)
        values = torch.arange(8).to(dtype).view(2, 4)
        pending = readback.start(_produced(device, values))
        assert pending.tolist() == values.tolist()
        assert pending.tolist() == values.tolist()


def test_tolist_waits_for_its_own_copy_only() -> None:
    readback, device = _simulated()
    pending = readback.start(_produced(device, torch.tensor([7])))
    later: list[int] = []
    device.compute.push(lambda: later.append(1), lambda: False)  # kernels that never end
    assert pending.tolist() == [7]
    assert not later


def test_ring_comes_round_to_values_nobody_has_read() -> None:
    readback, device = _simulated()
    order = random.Random(3)
    expected, pending = [], []
    for step in range(150):
        values = torch.arange(1 + step % 7) + step
        expected.append(values.tolist())
        pending.append(readback.start(_produced(device, values)))
        if step % 5 == 0:
            assert pending[order.randrange(len(pending))].tolist() is not None
    assert [entry.tolist() for entry in pending] == expected
    assert device.events == 2 * len(readback._ring)


def test_more_than_an_entry_holds_and_strided_values() -> None:
    readback, device = _simulated()
    large = torch.arange(40_000).view(5000, 8)
    pending: list[Pending] = [readback.start(_produced(device, large)) for _ in range(3)]
    assert all(entry.tolist() == large.tolist() for entry in pending)
    assert readback.start(large[:3, ::2]).tolist() == large[:3, ::2].tolist()


def test_the_host_does_something_else_while_it_waits() -> None:
    device, looked = SimulatedDevice(), [0]

    def meanwhile() -> None:
        looked[0] += 1

    readback = Readback(cast(CudaDevice, device), meanwhile)
    pending = readback.start(_produced(device, torch.tensor([7])))
    for _ in range(50):
        device.compute.queue.appendleft((lambda: True, lambda: None))  # kernels before
    assert pending.tolist() == [7]
    assert looked[0] > 10


class TestUpload:
    def _read(self, device: SimulatedDevice, sent: Sent, into: list[list[int]]) -> None:
        """A kernel of the compute stream that reads the values some time later."""
        values = sent.take()
        device.compute.push(lambda: into.append(values.tolist()))

    @pytest.mark.parametrize("capacity", [1, 2, 5])
    def test_kernels_read_what_was_sent_for_them(self, capacity: int) -> None:
        for seed in range(20):
            device, read = SimulatedDevice(seed), list[list[int]]()
            upload = Upload(cast(CudaDevice, device), cast(torch.cuda.Stream, device.new_stream()), capacity)
            expected = [[step + place for place in range(1 + step % 5)] for step in range(30)]
            for values in expected:
                self._read(device, upload.send(values), read)
            device.synchronize()
            assert read == expected

    def test_without_its_waits_they_would_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The test above can fail: a copy that does not wait for the readers before it, or readers not for it."""
        for stream in ("compute", "copies"):
            wrong = False
            for seed in range(20):
                device, read = SimulatedDevice(seed), list[list[int]]()
                copies = device.new_stream()
                monkeypatch.setattr(
                    {"compute": device.compute, "copies": copies}[stream], "wait_event", lambda _e: None
                )
                upload = Upload(cast(CudaDevice, device), cast(torch.cuda.Stream, copies), 1)
                for step in range(10):
                    self._read(device, upload.send([step]), read)
                device.synchronize()
                wrong |= read != [[step] for step in range(10)]
            assert wrong, stream

    def test_its_buffers_outlive_inference_mode(self) -> None:
        """The first forward may run in inference_mode and the next, as `generate` does, in no_grad."""
        device = SimulatedDevice()
        upload = Upload(cast(CudaDevice, device), cast(torch.cuda.Stream, device.new_stream()), 1)

        def sent(values: list[int]) -> object:
            made = upload.send(values)
            device.synchronize()
            return made.take().tolist()

        with torch.inference_mode():
            assert sent([3, 4]) == [3, 4]
        with torch.no_grad():
            assert sent([5]) == [5]
        assert device.events == 2


def test_values_would_be_wrong_without_the_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation shows a copy that does not wait: the tests above can fail."""
    wrong: list[Any] = []
    for seed in range(20):
        readback, device = _simulated(seed)
        for entry in readback._ring:
            monkeypatch.setattr(entry._stream, "wait_event", lambda _event: None)
        wrong.append(readback.start(_produced(device, torch.tensor([7]))).tolist() != [7])
    assert any(wrong)
