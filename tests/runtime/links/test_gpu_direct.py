"""GPUDirect's order and errors, with stand-ins for a device and for kvikio, after its documentation: no GPU ran it."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch

from expertcast.data.discovery import find_moe_layers
from expertcast.predictors import ExpertcastError
from expertcast.runtime import OffloadConfig, offload
from expertcast.runtime.links.driver import CudaDevice
from expertcast.runtime.links.gpu_direct import GpuDirectLink
from expertcast.runtime.storage.direct_read import Read
from expertcast.runtime.storage.disk_store import DiskStore
from expertcast.runtime.storage.gpu_direct import GpuDirectReader, load_kvikio
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store_file import FILE_NAME
from expertcast.runtime.timed.device import TimedDevice
from expertcast.runtime.transport import make_link
from tests.families.models import tiny_model
from tests.runtime.conftest import assert_same, greedy
from tests.runtime.faults import INPUTS


class _Future:
    def __init__(self, count: int) -> None:
        self._count = count

    def get(self) -> int:
        return self._count


class _CuFile:
    """`kvikio.CuFile` as its documentation has it, into host memory."""

    def __init__(self, file: Path | str, flags: str = "r") -> None:
        assert flags == "r"
        self._file = os.open(file, os.O_RDONLY)

    def pread(self, buf: Any, size: int | None = None, file_offset: int = 0, task_size: int | None = None) -> _Future:
        assert size is not None
        return _Future(os.preadv(self._file, [buf.numpy().data[:size]], file_offset))

    def close(self) -> None:
        os.close(self._file)


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("kvikio")
    module.CuFile = _CuFile  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvikio", module)


class _Event:
    """Reached when a test says so."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    def record(self, _stream: object) -> None:
        pass

    def synchronize(self) -> None:
        assert self.reached.wait(30)


class _Device:
    """What the link asks of a device, and the events that it was given."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.events: list[_Event] = []

    def new_stream(self) -> object:
        return self

    def current_stream(self) -> object:
        return self

    def new_event(self) -> _Event:
        self.events.append(_Event())
        return self.events[-1]


class _Link(GpuDirectLink):
    def __init__(self, device: _Device | TimedDevice) -> None:
        super().__init__()
        self.device = device

    def _device_of(self, pool: SlotPool) -> CudaDevice:
        return cast(CudaDevice, self.device)


class _TimedLink(_Link):
    """Threads have no part in virtual time, and need none: kernels of this device are over when they are launched."""

    def _wait_for_slot(self, read: Read) -> None:
        pass


@pytest.mark.parametrize("fields", [{"slots": 5}, {"cache": False}, {"predictor": "next_norm", "slots": 9}])
def test_same_bits(kvikio: None, fields: dict[str, object], tmp_path: Path) -> None:
    """Also after a file that was cut off for a while."""
    model, link = tiny_model("qwen3_moe"), _TimedLink(TimedDevice(1e9))
    before = greedy(model, INPUTS)
    with offload(model, store="disk", store_folder=tmp_path, link=link, **fields) as offloaded:  # type: ignore[arg-type]
        assert_same(greedy(offloaded, INPUTS), before)
        assert link.bytes_moved > 0
        path = tmp_path / FILE_NAME
        content = path.read_bytes()
        os.truncate(path, 8192)
        with pytest.raises(ExpertcastError, match="by GPUDirect: it was cut off or changed"):
            greedy(offloaded, {"input_ids": torch.arange(1, 30).view(1, -1)})
        path.write_bytes(content)
        assert_same(greedy(offloaded, INPUTS), before)
    assert_same(greedy(model, INPUTS), before)


def test_a_slot_is_not_filled_before_its_last_reader_is_over(kvikio: None, tmp_path: Path) -> None:
    view, device = find_moe_layers(tiny_model("qwen3_moe")), _Device()
    store, link = DiskStore(view, tmp_path), _Link(device)
    store.pack(view)
    pool = SlotPool(store.layout, 2, torch.device("cpu"))
    link.attach(store, pool)
    (zeroed,) = device.events[-1:]
    first = link.submit(3, 0, urgent=True)
    assert not first.done
    zeroed.reached.set()
    link.wait(first)
    assert torch.equal(pool.block(0), store.block(3))
    link.mark_read([0])
    again, other = link.submit(4, 0, urgent=True), link.submit(5, 1, urgent=False)
    link.wait(other)
    assert not again.done
    assert torch.equal(pool.block(0), store.block(3))
    device.events[-1].reached.set()
    link.wait(again)
    assert torch.equal(pool.block(0), store.block(4))
    link.close()
    store.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(8)) * 4096)
    return path


def _read(number: int, urgent: bool = False) -> Read:
    return Read(torch.zeros(16, dtype=torch.uint8), None, urgent, offset=16 * number)


def test_urgent_first_and_what_has_not_begun_can_be_dropped(kvikio: None, file: Path) -> None:
    held, order = threading.Event(), list[int]()

    def free(read: Read) -> None:
        assert held.wait(30)
        order.append(read.offset // 16)

    reader = GpuDirectReader(file, 1, free)
    reads = [_read(number, urgent=number == 3) for number in range(5)]
    for read in reads:
        reader.submit(read)
    reader.promote(reads[4])
    assert reader.cancel(reads[1])
    held.set()
    for read in (reads[0], *reads[2:]):
        read.wait()
        assert read.target.tolist() == list(range(8)) * 2
    assert sorted(order) == [0, 2, 3, 4]
    assert order.index(2) == 3
    assert not reader.cancel(reads[2])
    reader.close()


def test_what_cannot_be_read_is_the_error_of_whoever_waits(kvikio: None, file: Path) -> None:
    reader = GpuDirectReader(file, 2, lambda _read: None)
    beyond, good = _read(10**6), _read(0)
    reader.submit(beyond)
    reader.submit(good)
    with pytest.raises(ExpertcastError, match="cut off or changed"):
        beyond.wait()
    good.wait()
    reader.close()
    with pytest.raises(ExpertcastError, match=r"cannot read .* by GPUDirect"):
        GpuDirectReader(file.with_name("none"), 1, lambda _read: None)


def test_where_it_is_not_installed(tmp_path: Path) -> None:
    """One line; nothing is begun."""
    if importlib.util.find_spec("kvikio"):
        pytest.skip("it is")
    with pytest.raises(ExpertcastError, match=r"needs kvikio \(.*\): install kvikio-cu12 .* or use link='disk'"):
        make_link(OffloadConfig(store="disk", link="gpudirect"), "cuda")


def test_refusals(kvikio: None, tmp_path: Path) -> None:
    assert load_kvikio() is sys.modules["kvikio"]
    with pytest.raises(ExpertcastError, match="needs a model on CUDA, this one is on cpu: use 'disk'"):
        make_link(OffloadConfig(store="disk", link="gpudirect"), "cpu")
    assert isinstance(make_link(OffloadConfig(store="disk", link="gpudirect"), "cuda"), GpuDirectLink)
    with pytest.raises(ExpertcastError, match="give codec='raw', or link='disk'"):
        offload(tiny_model("qwen3_moe").to(torch.bfloat16), store="disk", codec="bitsplit", link=_Link(_Device()))
    with pytest.raises(ExpertcastError, match="bandwidth also to disk"):
        make_link(OffloadConfig(store="disk", link="gpudirect", bandwidth=1e9), "cuda")
