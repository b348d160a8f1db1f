"""Links that move packed copies: how many bytes, how long, and what is in the slot afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime import CudaLink, EmulatedLink, InstantLink, KernelLink, Link
from expertcast.runtime.storage.layout import FULL, PRECISIONS
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from tests.families.models import tiny_model
from tests.runtime.links.manual import ManualLink, SteppedLink
from tests.runtime.links.simulated_device import SimulatedDevice


@pytest.fixture(scope="module")
def store() -> Iterator[ExpertStore]:
    view = find_moe_layers(tiny_model("gpt_oss"))
    store = ExpertStore(view)
    store.pack(view)
    store.add_copies(PRECISIONS)
    yield store
    store.close()


def _attached(link: Link, store: ExpertStore) -> SlotPool:
    pool = SlotPool(store.layout, 8, torch.device("cpu"))
    link.attach(store, pool)
    return pool


def _expanded(store: ExpertStore, key: int, precision: str) -> torch.Tensor:
    """The block that the packed copy stands for; padding is what a slot holds there."""
    block = torch.zeros(store.layout.block_bytes, dtype=torch.uint8)
    packed = store.copies(precision)
    packed.layout.expand(packed.block(key), block)
    return block


def _fields_equal(store: ExpertStore, block: torch.Tensor, other: torch.Tensor) -> bool:
    fields = store.layout.fields
    return all(
        torch.equal(block[f.offset : f.offset + f.nbytes], other[f.offset : f.offset + f.nbytes]) for f in fields
    )


class SimulatedCudaLink(CudaLink):
    """On a simulated device, whose streams run in any order that events allow."""

    def _device_of(self, pool: SlotPool) -> Any:
        self.simulated = SimulatedDevice(seed=5)
        return self.simulated


@pytest.mark.parametrize("make", [InstantLink, lambda: EmulatedLink(1e9), ManualLink, SteppedLink, SimulatedCudaLink])
def test_packed_bytes_move_and_become_blocks(make: Any, store: ExpertStore) -> None:
    link = make()
    pool = _attached(link, store)
    sent = [(3, 0, "int8"), (17, 1, "int4"), (30, 2, "int2"), (9, 3, FULL)]
    copies = [link.submit(key, slot, urgent=slot != 2, precision=precision) for key, slot, precision in sent]
    for copy in copies:
        link.wait(copy)
        if isinstance(link, SimulatedCudaLink):
            link.synchronize()
        if copy.precision != FULL:
            link.expand(copy)
    for (key, slot, precision), copy in zip(sent, copies, strict=True):
        assert copy.precision == precision
        expected = store.block(key) if precision == FULL else _expanded(store, key, precision)
        assert _fields_equal(store, pool.block(slot), expected)
    assert link.copies == 4
    sizes = [store.copies(precision).block_bytes for precision in PRECISIONS]
    assert link.bytes_moved == sum(sizes) + store.layout.block_bytes
    assert [link.block_bytes(name) for name in (*PRECISIONS, FULL)] == [*sizes, store.layout.block_bytes]
    link.close()


def test_only_a_packed_copys_bytes_are_written(store: ExpertStore) -> None:
    """Before it is expanded, a slot holds the packed block and behind it what was there."""
    link = ManualLink()
    pool = _attached(link, store)
    pool.block(4).fill_(7)
    link.submit(21, 4, urgent=True, precision="int2")
    link.arrive()
    size = store.copies("int2").block_bytes
    assert torch.equal(pool.block(4)[:size], store.copies("int2").block(21))
    assert bool((pool.block(4)[size:] == 7).all())


def test_an_emulated_copy_takes_as_long_as_its_bytes(store: ExpertStore) -> None:
    """At one full block a millisecond and 0.1 ms latency: 1.1 ms in full, the packed ones by their share of bytes."""
    full = store.layout.block_bytes
    link = EmulatedLink(full / 1e-3, 1e-4)
    _attached(link, store)
    expected = 0.0
    for precision in (FULL, *PRECISIONS):
        link.wait(link.submit(1, 1, urgent=True, precision=precision))
        expected += 1e-4 + link.block_bytes(precision) / full * 1e-3
    link.close()
    assert link.busy_s == pytest.approx(expected, rel=1e-6)
    assert link.copy_s == pytest.approx(1.1e-3)


def test_a_measured_copys_time_is_that_of_a_full_one(store: ExpertStore) -> None:
    """Copies of 1/2 and 1/4 of a block's bytes in 3 s: a whole block takes 4."""
    link = ManualLink()
    _attached(link, store)
    assert link.copy_s == 0.0
    link.bytes_moved, link.busy_s, link.copies = store.layout.block_bytes * 3 // 4, 3.0, 2
    assert link.copy_s == pytest.approx(4.0)


def test_the_next_copy_waits_until_a_packed_one_is_expanded(store: ExpertStore) -> None:
    """An expansion reads and writes its slot on compute's stream: a copy that follows at once comes after it."""
    link = SimulatedCudaLink()
    pool = _attached(link, store)
    first = link.submit(2, 0, urgent=True, precision="int4")
    link.wait(first)
    expansion = []
    link.simulated.compute.push(lambda: expansion.append(pool.block(0)[:64].clone()))  # as a kernel of `expand`
    link.mark_read([0])
    link.wait(link.submit(5, 0, urgent=True))
    link.simulated.synchronize()
    assert torch.equal(expansion[0], store.copies("int4").block(2)[:64])
    assert torch.equal(pool.block(0), store.block(5))
    link.close()


def test_expand_counts_as_a_reader(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    link = InstantLink()
    _attached(link, store)
    read: list[list[int]] = []
    monkeypatch.setattr(link, "mark_read", read.append)
    link.expand(link.submit(2, 6, urgent=True, precision="int2"))
    assert read == [[6]]


@pytest.mark.parametrize("make", [InstantLink, lambda: EmulatedLink(1e9), SimulatedCudaLink])
def test_a_precision_without_copies_is_refused(make: Any) -> None:
    view = find_moe_layers(tiny_model("olmoe"))
    bare = ExpertStore(view)
    bare.pack(view)
    bare.add_copies(("int8",))
    link = make()
    _attached(link, bare)
    with pytest.raises(ExpertcastError, match="no 'int4' copies of the experts: choose from full, int8"):
        link.submit(0, 0, urgent=True, precision="int4")
    link.close()


def test_the_kernel_link_moves_full_experts_only(store: ExpertStore) -> None:
    link = KernelLink()
    _attached(link, store)
    with pytest.raises(ExpertcastError, match="link 'kernel' moves experts in full, not as int4: take link 'cuda'"):
        link.submit(0, 0, urgent=True, precision="int4")
    link.close()
