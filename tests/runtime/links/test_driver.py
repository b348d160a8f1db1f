"""What the driver is asked, with answers as its documentation gives them; and devices with their numbers."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from expertcast.data.machine import torch_device, with_index
from expertcast.data.moe_layers import find_moe_layers
from expertcast.runtime.benchmarking.runs import without_experts_to
from expertcast.runtime.links import driver
from expertcast.runtime.links.driver import CudaDevice
from expertcast.runtime.recording.recorder import Recorder
from expertcast.runtime.storage import slots
from expertcast.runtime.storage.layout import BlockLayout, Field
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from tests.families.models import tiny_model

REGISTERED, PAGEABLE, ON_DEVICE = 0x1000, 0x2000, 0x3000
LAYOUT = BlockLayout(fields=(Field(name="w", shape=(64,), dtype=torch.float32, offset=0),), block_bytes=256)


class _Driver:
    """Answers cuPointerGetAttribute as the driver API's documentation says.

    The memory's type is an error for what was neither allocated nor registered. A device pointer exists for what
    kernels may read: on a system that lets them read pageable memory (HMM, ATS), for that too.
    """

    def __init__(self, *, reads_pageable: bool, moved_by: int) -> None:
        self._reads_pageable, self._moved_by = reads_pageable, moved_by

    def cuPointerGetAttribute(self, data: Any, attribute: int, pointer: int) -> int:
        if attribute == 2:
            if pointer == PAGEABLE:
                return 1
            data._obj.value = 2 if pointer == ON_DEVICE else 1
            return 0
        assert attribute == 3
        if pointer == PAGEABLE and not self._reads_pageable:
            return 1
        data._obj.value = pointer + (self._moved_by if pointer == REGISTERED else 0)
        return 0


@pytest.fixture
def second_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two CUDA devices, the second one current."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


@pytest.mark.parametrize("reads_pageable", [False, True])
@pytest.mark.parametrize("moved_by", [0, 0x10000])
def test_only_page_locked_memory_has_an_address(
    reads_pageable: bool, moved_by: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = _Driver(reads_pageable=reads_pageable, moved_by=moved_by)
    monkeypatch.setattr(driver, "_driver", lambda: answers)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda: cast(Any, type("Stream", (), {"query": lambda _: True})())
    )
    device = CudaDevice(torch.device("cuda", 0))
    assert device.address_of(REGISTERED) == REGISTERED + moved_by
    assert device.address_of(PAGEABLE) is None
    assert device.address_of(ON_DEVICE) is None


def test_the_fake_answers_through_references_like_the_driver() -> None:
    value = ctypes.c_uint64()
    assert _Driver(reads_pageable=True, moved_by=0).cuPointerGetAttribute(ctypes.byref(value), 3, PAGEABLE) == 0
    assert value.value == PAGEABLE


@pytest.mark.usefixtures("second_device")
def test_cuda_without_a_number_is_the_current_device() -> None:
    assert with_index("cuda") == with_index(torch.device("cuda")) == torch.device("cuda:1")
    assert with_index("cuda:0") == torch.device("cuda:0")
    assert with_index("cpu") == torch.device("cpu")
    assert torch_device("cuda") == torch_device(None) == torch.device("cuda:1")
    assert torch_device("cuda:0") == torch.device("cuda:0")


@pytest.mark.usefixtures("second_device")
def test_whatever_keeps_a_device_keeps_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_driver", lambda: None)
    monkeypatch.setattr(
        slots, "_allocate", lambda layout, count, _device: torch.zeros(count * layout.block_bytes).byte()
    )
    named = torch.device("cuda")
    assert CudaDevice(named).device == torch.device("cuda:1")
    assert SlotPool(LAYOUT, 2, named).device == torch.device("cuda:1")
    assert Recorder("cuda")._device == torch.device("cuda:1")
    model = tiny_model("qwen3_moe")
    view = find_moe_layers(model)
    assert ExpertStore(view, device=named).device == torch.device("cuda:1")
    there = cast(Any, SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda:1"))])))
    assert without_experts_to(there, named) is there, "a model that is there is not moved"
