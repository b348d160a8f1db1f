"""The order of copies and kernels that the device-side link sets up, executed by a simulation of streams."""

from __future__ import annotations

import random
from functools import partial
from typing import Any, cast
from weakref import ref

import pytest
import torch

from expertcast.runtime.links.copy import BlockCopier
from expertcast.runtime.links.driver import CudaDevice
from expertcast.runtime.links.kernel import KernelLink
from expertcast.runtime.links.tables import Moves
from expertcast.runtime.recording.recorder import Recorder
from expertcast.runtime.storage.layout import BlockLayout, Field
from expertcast.runtime.storage.slots import SlotPool
from tests.runtime.blocks import Blocks
from tests.runtime.links.simulated_device import SimulatedDevice, SimulatedStream

EXPERTS, SLOTS = 12, 5
LAYOUT = BlockLayout(fields=(Field(name="w", shape=(64,), dtype=torch.float32, offset=0),), block_bytes=256)


class _LateCopier(BlockCopier):
    """Copies when the link's stream comes to it."""

    def __init__(self, link: _SimulatedLink, store: Blocks, pool: SlotPool) -> None:
        self._link, self._store, self._pool = link, store, pool

    def copy(self, moves: Moves) -> None:
        size = LAYOUT.block_bytes
        for key, slot, moved in zip(*(tensor.tolist() for tensor in moves), strict=True):
            if moved:
                source, target = self._store.block(key).data_ptr(), self._pool.block(slot).data_ptr()
                self._link.device.to_device(target, source, size, cast(Any, self._link._stream))


class _SimulatedLink(KernelLink):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.device = SimulatedDevice(seed)

    def _device_of(self, pool: SlotPool) -> CudaDevice | None:
        return cast(CudaDevice, self.device)


def _drive(seed: int, link: _SimulatedLink) -> tuple[int, int]:
    """Layers that bring, forecast and read random experts; returns (reads, wrong ones)."""
    order = random.Random(seed)
    store, pool = (
        Blocks(LAYOUT, EXPERTS, torch.Generator().manual_seed(1)),
        SlotPool(LAYOUT, SLOTS, torch.device("cpu")),
    )
    link.attach(store, pool)
    link._copier = _LateCopier(link, store, pool)
    read: list[int] = []
    wrong: list[int] = []

    def kernel(slots: list[int], keys: list[int]) -> None:
        for slot, key in zip(slots, keys, strict=True):
            read.append(key)
            if not torch.equal(pool.block(slot), store.block(key)):
                wrong.append(key)

    for _ in range(40):
        ids = order.sample(range(EXPERTS), 2)
        ids_TK = torch.tensor([ids])
        link.move(link.residency.bring(0, ids_TK))
        ticket = link.ticket()
        if order.random() < 0.7:
            forecast = torch.tensor(order.sample(range(EXPERTS), 3))
            link.move(link.residency.expect(0, forecast, running=2), urgent=False)
        slots = link.residency.slots_for(0, ids_TK)[0].tolist()
        link.join(ticket)
        for _ in range(2):
            link.device.compute.push(partial(kernel, slots, ids))
        link.device.steps(order.randrange(30))
    link.synchronize()
    return len(read), len(wrong)


def test_no_schedule_lets_a_kernel_see_another_block() -> None:
    for seed in range(30):
        assert _drive(seed, _SimulatedLink(seed)) == (160, 0)


@pytest.mark.parametrize("missing", ["fork", "join"])
def test_either_event_left_out_is_seen(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = 0
    for seed in range(10):
        link = _SimulatedLink(seed)
        if missing == "join":
            monkeypatch.setattr(link, "join", lambda _ticket: None)
        else:
            new_stream = link.device.new_stream
            link.device.new_stream = lambda priority=0, new=new_stream: _without_fork(new())  # type: ignore[method-assign]
        wrong += _drive(seed, link)[1]
    assert wrong > 0


def _without_fork(stream: Any) -> Any:
    stream.wait_stream = lambda _other: None
    return stream


@pytest.mark.parametrize("followed", [True, False])
def test_forwards_on_two_streams(followed: bool) -> None:
    """What one stream may still read is not overwritten for the other."""
    store, wrong = Blocks(LAYOUT, EXPERTS, torch.Generator().manual_seed(1)), []

    def read(pool: SlotPool, slot: int, key: int) -> None:
        wrong.append(not torch.equal(pool.block(slot), store.block(key)))

    for seed in range(20):
        link, pool = _SimulatedLink(seed), SlotPool(LAYOUT, SLOTS, torch.device("cpu"))
        link.attach(store, pool)
        link._copier = _LateCopier(link, store, pool)
        for ids in ([3, 7, 8, 9, 10], [0, 1, 2, 4, 5]):
            link.device.compute = SimulatedStream(link.device)
            if followed:
                link.follow()
            link.move(link.residency.bring(0, torch.tensor([ids])))
            slots = link.residency.slots_for(0, torch.tensor(ids)).tolist()
            link.join(link.ticket())
            for slot, key in zip(slots, ids, strict=True):
                link.device.compute.push(partial(read, pool, slot, key))
        link.synchronize()
    assert len(wrong) == 20 * 10
    assert any(wrong) is not followed


def test_closing_lets_go_of_the_slots() -> None:
    """The memory that they took has to be free when the experts are put back."""
    link, pool = _SimulatedLink(0), SlotPool(LAYOUT, SLOTS, torch.device("cpu"))
    link.attach(Blocks(LAYOUT, EXPERTS, torch.Generator().manual_seed(1)), pool)
    link._copier.words = pool.block(0).view(torch.int64)  # type: ignore[attr-defined]  # as the kernel's copier has them
    words = ref(link._copier.words)  # type: ignore[attr-defined]
    link.close()
    link.close()
    assert words() is None


def test_calls_are_timed_and_counted() -> None:
    link = _SimulatedLink(0)
    link.observer = Recorder()
    link.observer.device_time = lambda event: cast(Any, event).record_made.time  # type: ignore[method-assign]
    _drive(0, link)
    spans = link.observer.copies()
    assert len(spans) > 40
    assert {span.urgent for span in spans} == {True, False}
    assert sum(span.seconds for span in spans) == pytest.approx(link.busy_s)
    counts = link.residency.counts[0].tolist()
    assert link.copies == counts[2] + counts[3] > 40
    assert link.bytes_moved == link.copies * LAYOUT.block_bytes
    link.reset()
    assert link.copies == link.busy_s == 0
