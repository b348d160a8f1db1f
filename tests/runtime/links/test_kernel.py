"""The order of copies and kernels that the device-side link sets up, executed by a simulation of streams."""

from __future__ import annotations

import random
from functools import partial
from typing import Any, cast
from weakref import ref

import pytest
import torch

from expertcast.runtime.experimental import kernel_link as kernel
from expertcast.runtime.experimental.kernel_link import BlockCopier, KernelLink, Moves
from expertcast.runtime.links.driver import CudaDevice
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
        for key, slot, moved in zip(*(tensor.tolist() for tensor in moves), strict=True):
            if moved:
                target, source = self._pool.block(slot), self._store.block(key)
                self._link.device.to_device(target, source, cast(Any, self._link._stream))


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

    def compute(slots: list[int], keys: list[int]) -> None:
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
            link.device.compute.push(partial(compute, slots, ids))
        link.device.steps(order.randrange(30))
    link.synchronize()
    return len(read), len(wrong)


@pytest.mark.parametrize("timed", [256, 0])
def test_no_schedule_lets_a_kernel_see_another_block(timed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 0 times outstanding, events are used again from the first calls on."""
    monkeypatch.setattr(kernel, "_TIMED", timed)
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
    stream.wait_event = lambda _event: None
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


def _one_move(link: _SimulatedLink, expert: int) -> None:
    link.move(link.residency.bring(0, torch.tensor([[expert % EXPERTS]])))


def test_a_thousand_calls_make_few_events() -> None:
    link = _SimulatedLink(0)
    link.attach(Blocks(LAYOUT, EXPERTS, torch.Generator().manual_seed(1)), SlotPool(LAYOUT, SLOTS, torch.device("cpu")))
    for step in range(1000):
        _one_move(link, step)
        link.join(link.ticket())
        link.device.steps(10)
    assert link.device.events <= 1 + 2 * (kernel._TIMED + 1), "a fork's, and two for each call whose times are awaited"


def test_an_event_that_compute_has_not_waited_for_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else compute would wait for a later call than the one whose slots it reads."""
    monkeypatch.setattr(kernel, "_TIMED", 0)
    link = _SimulatedLink(0)
    link.attach(Blocks(LAYOUT, EXPERTS, torch.Generator().manual_seed(1)), SlotPool(LAYOUT, SLOTS, torch.device("cpu")))
    for step in range(20):
        _one_move(link, step)
        link.device.synchronize()  # every call is over
    events = [event for call in link._under_way for event in (call.begun, call.arrived)]
    assert len(events) == len(set(map(id, events))) == 40
    link.join(link.ticket())
    link.synchronize()
    made = link.device.events
    _one_move(link, 3)
    assert link.device.events == made


def test_a_graphs_events_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event that was recorded while a graph was captured stands for a node of it: nobody else may record it."""
    link = _SimulatedLink(0)
    link.attach(Blocks(LAYOUT, EXPERTS, torch.Generator().manual_seed(1)), SlotPool(LAYOUT, SLOTS, torch.device("cpu")))
    outside = []
    for captured in (False, True, False, True, False):
        monkeypatch.setattr(link.device, "capturing", lambda now=captured: now)
        made = link.device.events
        calls = []
        for step in range(10):
            _one_move(link, step)
            calls.append(link._under_way[-1])
            link.join(link.ticket())
        link.synchronize()
        events = {id(event) for call in calls for event in (call.begun, call.arrived)}
        if captured:
            assert {call.begun for call in calls} == {None}
            assert link.device.events == made + 10
            assert not events & outside[-1]
        else:
            assert not outside or events <= outside[-1], "all of them taken from the pool"
            outside.append(events)


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
