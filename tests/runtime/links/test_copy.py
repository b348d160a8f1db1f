"""Copies by kernel: the Triton kernels, interpreted on the CPU, against plain ones."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from expertcast.predictors import ExpertcastError
from expertcast.runtime.experimental import kernel_link as device_copy
from expertcast.runtime.experimental.kernel_link import HostCopier, KernelCopier, Moves, has_triton
from expertcast.runtime.storage.layout import BlockLayout, Field
from expertcast.runtime.storage.slots import SlotPool
from tests.runtime.blocks import Blocks

ROOT = Path(__file__).resolve().parents[3]
LAYOUT = BlockLayout(fields=(Field(name="w", shape=(64,), dtype=torch.float32, offset=0),), block_bytes=256)


def test_host_copier_moves_what_is_marked() -> None:
    store = Blocks(LAYOUT, 5, torch.Generator().manual_seed(0))
    pool = SlotPool(LAYOUT, 4, torch.device("cpu"))
    moves = Moves(torch.tensor([4, 1, 2]), torch.tensor([0, 3, 2]), torch.tensor([True, False, True]))
    HostCopier(store, pool).copy(moves)
    assert torch.equal(pool.block(0), store.block(4))
    assert torch.equal(pool.block(2), store.block(2))
    assert not pool.block(3).any()
    assert not pool.block(1).any()


@pytest.mark.skipif(not has_triton(), reason="triton comes with CUDA builds of torch only")
def test_interpreted_kernels_do_what_the_torch_forms_do() -> None:
    """In a process of its own: Triton decides when it is imported whether it interprets."""
    command = [sys.executable, "-m", "tests.runtime.links.kernel_script"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "same"


class _NoDriver:
    """A driver that knows no page-locked memory."""

    def __init__(self, _device: torch.device) -> None: ...

    def address_of(self, _host: int) -> None:
        return None


class _Launches:
    """Stands for the Triton kernel: notes how it is launched."""

    def __init__(self) -> None:
        self.grid: tuple[int, ...] = ()
        self.given: dict[str, int] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grid = grid
        return lambda *_tensors, **given: self.given.update(given)


class _Driver:
    """All memory is page-locked."""

    def __init__(self, _device: torch.device) -> None: ...

    def address_of(self, host: int) -> int:
        return host


@pytest.mark.parametrize(
    ("multiprocessors", "megabytes", "programs"), [(132, 9, 16), (132, 300, 16), (40, 9, 10), (16, 9, 4), (2, 9, 1)]
)
def test_few_programs_and_wide_ones(
    multiprocessors: int, megabytes: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more than a quarter of the device; each block whole, and enough on its way for 55 GB/s at 2 us."""
    launches, size = _Launches(), megabytes * 2**20 + 256
    made = SimpleNamespace(copy_blocks=launches)
    monkeypatch.setitem(sys.modules, "expertcast.runtime.experimental.triton_kernels", made)
    monkeypatch.setattr(device_copy, "has_triton", lambda: True)
    monkeypatch.setattr(device_copy, "CudaDevice", _Driver)
    found = SimpleNamespace(multi_processor_count=multiprocessors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: found)
    layout = BlockLayout(fields=(Field(name="w", shape=(size,), dtype=torch.uint8, offset=0),), block_bytes=size)
    pool = SlotPool(layout, 1, torch.device("cpu"))
    to_tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda values, **_on_cuda: to_tensor(values))
    pool.device = torch.device("cuda", 0)
    copier = device_copy.block_copier(Blocks(LAYOUT, 2, torch.Generator()), pool)
    copier.copy(Moves(torch.arange(1), torch.arange(1), torch.ones(1).bool()))
    assert launches.grid == (copier.programs,) == (programs,)
    given = launches.given
    assert given["WORDS"] * 8 == size
    assert programs * given["WIDTH"] * given["TURNS"] >= given["WORDS"]
    assert programs * given["WIDTH"] * (given["TURNS"] - 1) < given["WORDS"]
    if programs == 16:
        assert programs * given["WIDTH"] * 8 >= 55e9 * 2e-6
    assert given["WIDTH"] * 8 % (given["num_warps"] * 32 * 16) == 0, "whole loads of 16 bytes for each thread"


def test_small_blocks_take_no_more_programs_than_they_fill() -> None:
    pool = SlotPool(LAYOUT, 2, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "expertcast.runtime.experimental.triton_kernels", SimpleNamespace(copy_blocks=None))
        assert KernelCopier(torch.zeros(1), pool).programs == 1
    assert HostCopier(Blocks(LAYOUT, 1, torch.Generator()), pool).programs == 0


def test_memory_that_is_not_page_locked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store, pool = Blocks(LAYOUT, 5, torch.Generator()), SlotPool(LAYOUT, 2, torch.device("cpu"))
    pool.device = torch.device("cuda")
    monkeypatch.setattr(device_copy, "has_triton", lambda: False)
    with pytest.raises(ExpertcastError, match="needs the package triton"):
        device_copy.block_copier(store, pool)
    monkeypatch.setattr(device_copy, "has_triton", lambda: True)
    monkeypatch.setattr(device_copy, "CudaDevice", _NoDriver)
    with pytest.raises(ExpertcastError, match="expert 0 of the store lies elsewhere"):
        device_copy.block_copier(store, pool)
