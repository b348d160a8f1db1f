"""Links: rate, order, cancellation, failure."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from expertcast.data.moe_layers import find_moe_layers
from expertcast.runtime import EmulatedLink, InstantLink, Link
from expertcast.runtime.config import OffloadConfig, make_link
from expertcast.runtime.links.base import Copy
from expertcast.runtime.links.cuda import CudaLink
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from tests.families.models import tiny_model


@pytest.fixture(scope="module")
def store() -> ExpertStore:
    view = find_moe_layers(tiny_model("gpt_oss"))
    store = ExpertStore(view)
    store.pack(view)
    return store


def _attached(link: Link, store: ExpertStore, device: str = "cpu") -> SlotPool:
    pool = SlotPool(store.layout, 16, torch.device(device))
    link.attach(store, pool)
    return pool


def test_blocks_hold_every_parameter_aligned(store: ExpertStore) -> None:
    fields = store.layout.fields
    assert [field.name for field in fields] == ["gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"]
    assert all(field.offset % 256 == 0 for field in fields)
    assert store.layout.block_bytes % 256 == 0
    assert store.block(5).data_ptr() % 256 == 0
    assert store.nbytes == 4 * 8 * store.layout.block_bytes


@pytest.mark.parametrize("link", [InstantLink(), EmulatedLink(1e9, 1e-4)])
def test_bytes_arrive(link: Link, store: ExpertStore) -> None:
    pool = _attached(link, store)
    copies = [link.submit(key, slot, urgent=False) for slot, key in enumerate((3, 30, 17))]
    for copy in copies:
        link.wait(copy)
        assert link.poll(copy)
        assert torch.equal(pool.block(copy.slot), store.block(copy.key))
    assert link.bytes_moved == 3 * store.layout.block_bytes
    assert link.copies == 3
    link.reset()
    assert link.bytes_moved == 0
    link.close()


def test_rate_of_the_emulated_link(store: ExpertStore) -> None:
    """Ten copies of 1 ms latency and 1 ms transfer take 20 ms; the caller is free meanwhile."""
    link = EmulatedLink(store.layout.block_bytes / 1e-3, 1e-3)
    _attached(link, store)
    start = time.perf_counter()
    copies = [link.submit(key, key, urgent=False) for key in range(10)]
    submitted = time.perf_counter() - start
    link.wait(copies[-1])
    took = time.perf_counter() - start
    link.close()
    assert took > 0.0199
    assert submitted < took
    assert link.busy_s == pytest.approx(0.02, rel=1e-6)


def test_urgent_first_and_dropped_never(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    link = EmulatedLink(1e12)
    pool = _attached(link, store)
    move, gate, order = link._move, threading.Event(), []

    def gated(copy: Copy, *part: int) -> None:
        gate.wait(10)
        order.append(copy.key)
        move(copy, *part)

    monkeypatch.setattr(link, "_move", gated)
    first = link.submit(0, 0, urgent=False)
    while not first.started:
        time.sleep(1e-4)
    second, third, fourth = (link.submit(key, key, urgent=False) for key in (1, 2, 3))
    assert not link.cancel(first), "under way"
    assert link.cancel(third)
    link.promote(fourth)
    urgent = link.submit(4, 4, urgent=True)
    gate.set()
    for copy in (first, second, fourth, urgent):
        link.wait(copy)
    link.close()
    assert order[::2] == [0, 3, 4, 1], "each block comes in two halves"
    assert link.copies == 4
    assert not pool.block(2).any()


def test_a_copy_that_fails(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    link = EmulatedLink(1e12)
    _attached(link, store)

    def fail(*_args: Any) -> None:
        raise OSError("bus error")

    with monkeypatch.context() as patch:
        patch.setattr(link, "_move", fail)
        broken = link.submit(1, 1, urgent=True)
        with pytest.raises(OSError, match="bus error"):
            link.wait(broken)
    link.wait(link.submit(2, 2, urgent=True))
    link.close()


@pytest.mark.parametrize(("device", "kind"), [("cpu", InstantLink), ("cuda", CudaLink)])
def test_the_link_that_auto_takes(device: str, kind: type[Link]) -> None:
    """On CUDA the one that a reader can check, not one that never ran there."""
    assert type(make_link(OffloadConfig(), device)) is kind
