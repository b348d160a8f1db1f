"""Ordering of the CUDA link on simulated streams and events; readback of small values."""

from __future__ import annotations

import random
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from expertcast.data.machine import torch_device, with_index
from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors import ExpertcastError
from expertcast.runtime.benchmarking.bench import without_experts_to
from expertcast.runtime.links.cuda import CudaLink
from expertcast.runtime.links.driver import CudaDevice, Readback
from expertcast.runtime.recording.recorder import Observer, Recorder
from expertcast.runtime.storage import slots
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from tests.families.models import tiny_model
from tests.runtime.blocks import Blocks, bytes_layout
from tests.runtime.faults import RaiseAt
from tests.runtime.links.simulated_device import Reader, SimulatedDevice, SimulatedStream, drive

KEYS, SLOTS = 24, 4
STORE = Blocks(bytes_layout(256), KEYS, torch.Generator().manual_seed(0))
BLOCKS = [STORE.block(key) for key in range(KEYS)]


def _attached(
    device: CudaDevice, link: CudaLink | None = None, store: Blocks = STORE, window: int | None = None
) -> tuple[CudaLink, SlotPool]:
    link, pool = link or CudaLink(window), SlotPool(store.layout, SLOTS, torch.device("cpu"))
    link.driver = device
    link.attach(store, pool)
    return link, pool


@pytest.mark.parametrize("window", [1, 3])
def test_no_schedule_lets_a_kernel_see_another_block(window: int) -> None:
    for seed in range(40):
        device = SimulatedDevice(seed)
        link, pool = _attached(device, window=window)
        reader = drive(seed, link, pool, BLOCKS)
        assert (reader.read, reader.wrong) == (40 * 4, 0)
        link.close()


@pytest.mark.parametrize("followed", [True, False])
def test_forwards_on_two_streams(followed: bool) -> None:
    """A slot that one stream waited for is a hit on another stream, and is overwritten while both may read it."""
    wrong = 0
    for seed in range(40):
        device = SimulatedDevice(seed)
        link, pool = _attached(device)
        reader = Reader(device, pool, BLOCKS)
        for forward in range(4):
            device.compute = SimulatedStream(device)
            if followed:
                link.follow()
            if forward == 0:
                link.wait(link.submit(5, 0, urgent=True))
            reader.launch({5: 0})
            link.mark_read([0])
        link.wait(link.submit(6, 0, urgent=True))
        device.synchronize()
        assert reader.read == 8
        wrong += reader.wrong
        link.close()
    assert (wrong == 0) is followed


def test_every_copy_is_timed() -> None:
    device = SimulatedDevice(1)
    link, pool = _attached(device, window=2)
    link.observer = Recorder()
    link.observer.device_time = lambda event: event.record_made.time  # type: ignore[attr-defined, method-assign]
    drive(2, link, pool, BLOCKS, layers=100)
    link.synchronize()
    assert link.bytes_moved == link.copies * 256
    spans = link.observer.copies()
    assert len(spans) == link.copies > 100
    assert sum(span.seconds for span in spans) == pytest.approx(link.busy_s)
    assert all(earlier.end <= later.start for earlier, later in pairwise(spans))


def test_a_copy_that_the_driver_refuses() -> None:
    """The error is raised in `wait`; a failed prefetch shows it at `poll`."""
    device = SimulatedDevice()
    link, _ = _attached(device, window=2)
    device.fail_next_copy = True
    bad, good = link.submit(1, 0, urgent=True), link.submit(2, 1, urgent=True)
    with pytest.raises(RuntimeError, match="copy refused"):
        link.wait(bad)
    link.wait(good)
    device.fail_next_copy = True
    forecast = link.submit(3, 2, urgent=False)
    assert link.poll(forecast)
    assert forecast.error is not None
    link.close()
    assert link.copies == 1


def test_an_observer_without_a_time() -> None:
    """The copy still arrives, and `check` raises the observer's error."""
    device = SimulatedDevice()
    link, _ = _attached(device)
    link.observer = Observer()
    link.observer.device_time = RaiseAt(1, ZeroDivisionError())  # type: ignore[method-assign, assignment]
    copy = link.submit(1, 0, urgent=True)
    link.wait(copy)
    link.synchronize()
    assert copy.done
    with pytest.raises(ZeroDivisionError):
        link.check()
    link.close()


def test_window_is_worth_16_mib_of_blocks() -> None:
    assert _attached(SimulatedDevice())[0].window == (16 << 20) // 256
    with pytest.raises(ExpertcastError, match="window=0"):
        CudaLink(window=0)


# Small values to and from the device


def _produced(device: SimulatedDevice, values: Tensor) -> Tensor:
    """Return a tensor that the compute stream fills later."""
    made = torch.full_like(values, -1)
    device.compute.push(lambda: made.copy_(values))
    return made


def test_on_the_cpu_values_come_at_once() -> None:
    ids_TK = torch.tensor([[3, 1], [0, 2]])
    assert Readback(None).start(ids_TK).tolist() == [[3, 1], [0, 2]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_a_readback_waits_for_the_stream_that_makes_the_tensor(dtype: torch.dtype) -> None:
    """Many readbacks in flight, read in any order and twice, strided ones too."""
    for seed in range(10):
        device = SimulatedDevice(seed)
        readback, order = Readback(device), random.Random(seed)
        expected = [torch.arange(2 * step).to(dtype).view(2, step) + step for step in range(1, 20)]
        pending = [readback.start(_produced(device, values)) for values in expected]
        pending.append(readback.start(expected[9][:, ::2]))
        expected.append(expected[9][:, ::2])
        for index in order.choices(range(20), k=40):
            assert pending[index].tolist() == expected[index].tolist()


def test_a_readback_waits_for_its_own_copy_only() -> None:
    """The host calls `meanwhile` while it waits."""
    device, looked = SimulatedDevice(), []
    pending = Readback(device, lambda: looked.append(1)).start(_produced(device, torch.tensor([7])))
    for _ in range(50):
        device.compute.queue.appendleft((lambda: True, lambda: None))  # kernels before
    device.compute.push(lambda: None, lambda: False)  # kernels that never end
    assert pending.tolist() == [7]
    assert len(looked) > 10


def _note(sent: Tensor, into: list[list[int]]) -> None:
    """A kernel that reads the values."""
    into.append(sent.tolist())


def test_kernels_read_what_was_sent_for_them() -> None:
    for seed in range(10):
        device, read = SimulatedDevice(seed), list[list[int]]()
        link, _ = _attached(device)
        expected = [[step + place for place in range(step % 5)] for step in range(30)]  # none for a step of no tokens
        for values in expected:
            device.compute.push(partial(_note, link.send(values).take(), read))
        device.synchronize()
        assert read == expected


# Devices with their numbers


@pytest.fixture
def second_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two CUDA devices, the second one current."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


@pytest.mark.usefixtures("second_device")
def test_cuda_without_a_number_is_the_current_device() -> None:
    assert with_index("cuda") == with_index(torch.device("cuda")) == torch.device("cuda:1")
    assert with_index("cuda:0") == torch.device("cuda:0")
    assert with_index("cpu") == torch.device("cpu")
    assert torch_device("cuda") == torch_device(None) == torch.device("cuda:1")
    assert torch_device("cuda:0") == torch.device("cuda:0")


@pytest.mark.usefixtures("second_device")
def test_whatever_keeps_a_device_keeps_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "_allocate", lambda nbytes, *_: torch.zeros(nbytes, dtype=torch.uint8))
    named = torch.device("cuda")
    assert CudaDevice(named).device == torch.device("cuda:1")
    assert SlotPool(bytes_layout(256), 2, named).device == torch.device("cuda:1")
    assert Recorder("cuda")._device == torch.device("cuda:1")
    model = tiny_model("qwen3_moe")
    view = find_moe_layers(model)
    assert ExpertStore(view, device=named).device == torch.device("cuda:1")
    there = cast(Any, SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda:1"))])))
    assert without_experts_to(there, named) is there, "a model that is there is not moved"
