"""CUDA devices with their numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from expertcast.data.machine import torch_device, with_index
from expertcast.data.moe_layers import find_moe_layers
from expertcast.runtime.benchmarking.runs import without_experts_to
from expertcast.runtime.links.driver import CudaDevice
from expertcast.runtime.recording.recorder import Recorder
from expertcast.runtime.storage import slots
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from tests.families.models import tiny_model
from tests.runtime.blocks import bytes_layout


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
    monkeypatch.setattr(
        slots, "_allocate", lambda layout, count, _device: torch.zeros(count * layout.block_bytes).byte()
    )
    named = torch.device("cuda")
    assert CudaDevice(named).device == torch.device("cuda:1")
    assert SlotPool(bytes_layout(256), 2, named).device == torch.device("cuda:1")
    assert Recorder("cuda")._device == torch.device("cuda:1")
    model = tiny_model("qwen3_moe")
    view = find_moe_layers(model)
    assert ExpertStore(view, device=named).device == torch.device("cuda:1")
    there = cast(Any, SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda:1"))])))
    assert without_experts_to(there, named) is there, "a model that is there is not moved"
