"""Copies by kernel: the Triton kernels, interpreted on the CPU, against plain ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from expertcast.predictors import ExpertcastError
from expertcast.runtime.links import copy as device_copy
from expertcast.runtime.links.copy import HostCopier, has_triton
from expertcast.runtime.links.tables import Moves
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
