"""The disk behind a real CUDA device: bytes, page-locked blocks, and slots that are still read.

Every order is tried by the simulation in test_disk_cuda.py; here are the same rules on hardware.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from expertcast.data.moe_layers import find_moe_layers
from expertcast.runtime import offload
from expertcast.runtime.links.disk_cuda import CudaDiskLink
from expertcast.runtime.links.speed import link_speed
from expertcast.runtime.storage.disk_store import DiskStore
from expertcast.runtime.storage.slots import SlotPool
from tests.runtime.conftest import assert_same, greedy
from tests.runtime.links.cuda_helpers import LONG, MARKS, cuda_model, holds, prompt

pytestmark = [*MARKS, pytest.mark.parametrize("codec", ["raw", "bitsplit"])]


def attached(link: CudaDiskLink, codec: str, folder: Path) -> tuple[DiskStore, SlotPool]:
    view = find_moe_layers(cuda_model())
    store = DiskStore(view, folder, codec=codec)
    store.pack(view)
    pool = SlotPool(store.layout, 12, torch.device("cuda"))
    link.attach(store, pool)
    return store, pool


@pytest.mark.parametrize("places", [1, None])
def test_every_block_arrives(codec: str, places: int | None, tmp_path: Path) -> None:
    link = CudaDiskLink(places=places)
    store, pool = attached(link, codec, tmp_path)
    assert link._open_staging._memory.pinned
    for first in (0, 12):
        copies = [link.submit(first + slot, slot, urgent=slot % 3 == 0) for slot in range(12)]
        for copy in copies:
            link.wait(copy)
        assert all(holds(pool, store, slot, first + slot) for slot in range(12))
        link.mark_read(list(range(12)))
    link.synchronize()
    assert link.copies == 24
    assert link.busy_s > 0
    assert link_speed(link, store).rate > 0
    link.close()


def test_a_slot_is_not_overwritten_while_it_is_read(codec: str, tmp_path: Path) -> None:
    link = CudaDiskLink()
    store, pool = attached(link, codec, tmp_path)
    link.wait(link.submit(0, 0, urgent=True))
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)  # type: ignore[no-untyped-call]
    read = pool.block(0).clone()
    link.mark_read([0])
    copy = link.submit(9, 0, urgent=True)
    link.wait(copy)
    assert torch.equal(read.cpu(), store.block(0))
    assert holds(pool, store, 0, 9)
    link.close()


@pytest.mark.parametrize("fields", [{"slots": 5}, {"cache": False}, {"predictor": "next_norm", "slots": 9}])
def test_same_bits(codec: str, fields: dict[str, object], tmp_path: Path) -> None:
    model = cuda_model()
    before = greedy(model, prompt(1, 2, 3))
    with offload(model, store="disk", codec=codec, store_folder=tmp_path, **fields) as offloaded:  # type: ignore[arg-type]
        assert isinstance(offloaded.link, CudaDiskLink)
        assert_same(greedy(offloaded, prompt(1, 2, 3)), before)
    assert_same(greedy(model, prompt(1, 2, 3)), before)
