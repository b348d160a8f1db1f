"""Behaviour of every link: order, cancellation, failure, closing and counting, in the same situations."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors import ExpertcastError
from expertcast.runtime.config import OffloadConfig, make_link
from expertcast.runtime.links.base import InstantLink, Link
from expertcast.runtime.links.cuda import CudaLink
from expertcast.runtime.links.disk import DiskLink
from expertcast.runtime.links.disk_cuda import CudaDiskLink
from expertcast.runtime.links.emulated import EmulatedLink
from expertcast.runtime.recording.recorder import Observer
from expertcast.runtime.storage.disk_store import DiskStore
from expertcast.runtime.storage.layout import FULL, PRECISIONS
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from expertcast.runtime.storage.transfer import Transfer
from tests.families.models import tiny_model
from tests.runtime.faults import RaiseAt
from tests.runtime.links.simulated_device import SimulatedDevice

SLOTS = 10
Stores = dict[str, ExpertStore]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    """Stores with the same experts in memory, in a raw file and in a coded one, with copies in lower precision."""
    made: Stores = {}
    for name in ("memory", "raw", "bitsplit"):
        view = find_moe_layers(tiny_model("qwen3_moe").to(torch.bfloat16))
        in_file = name != "memory"
        made[name] = DiskStore(view, tmp_path_factory.mktemp(name), codec=name) if in_file else ExpertStore(view)
        made[name].pack(view)
        made[name].add_copies(PRECISIONS)
    yield made
    for store in made.values():
        store.close()


def _on_device(link: Link) -> Link:
    link.driver = SimulatedDevice(5)
    return link


@dataclass(frozen=True)
class Case:
    """A link, its store, and how many prefetches it begins before the first has arrived."""

    make: Callable[[], Link]
    store: str = "memory"
    begun: int = 1


CASES = {
    "instant": Case(InstantLink),
    "instant, raw file": Case(InstantLink, "raw"),
    "instant, coded file": Case(InstantLink, "bitsplit"),
    "emulated": Case(lambda: EmulatedLink(1e12)),
    "cuda": Case(lambda: _on_device(CudaLink(window=1))),
    "disk": Case(lambda: DiskLink(1), "raw"),
    "disk, coded": Case(lambda: DiskLink(1), "bitsplit", begun=2),
    "disk on cuda": Case(lambda: _on_device(CudaDiskLink(1, buffers=1)), "raw"),
    "disk on cuda, coded": Case(lambda: _on_device(CudaDiskLink(1, buffers=2)), "bitsplit", begun=2),
}
QUEUED = [name for name in CASES if not name.startswith("instant")]


class Attached:
    """A link between a store and slots; `release` continues the transfers that :meth:`hold` blocks."""

    def __init__(self, case: Case, stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.link = stores[case.store], case.make()
        self.pool = SlotPool(self.store.layout, SLOTS, torch.device("cpu"))
        self.link.attach(self.store, self.pool)
        self._patch = monkeypatch
        self._go, self._reached = threading.Event(), threading.Event()

    def submit(self, *keys: int, urgent: bool = False) -> list[Transfer]:
        """Submit each key into the slot of the same number."""
        return [self.link.submit(key, key, urgent=urgent) for key in keys]

    def settle(self) -> None:
        """Wait until the device is idle."""
        if isinstance(self.link, CudaLink):
            self.link.synchronize()

    def holds(self, copy: Transfer) -> bool:
        return torch.equal(self.pool.block(copy.slot), self.store.block(copy.key))

    def patch(self, before: Callable[[], None]) -> None:
        """Call a function before bytes of an expert are moved or read."""
        link = self.link
        if isinstance(link, DiskLink | CudaDiskLink):
            preadv = os.preadv
            self._patch.setattr(os, "preadv", lambda *args: (before(), preadv(*args))[1])
        else:
            source = link._source
            self._patch.setattr(link, "_source", lambda copy: (before(), source(copy))[1])

    def hold(self) -> None:
        """Block transfers that begin from now on until :meth:`release`."""

        def wait() -> None:
            self._reached.set()
            assert self._go.wait(20)

        device = self.link.driver
        if device is not None:
            assert isinstance(device, SimulatedDevice)
            device.frozen = True
        if device is None or isinstance(self.link, CudaDiskLink):
            self.patch(wait)
        else:
            self._reached.set()

    def begin(self, *keys: int) -> list[Transfer]:
        """Submit blocked prefetches; the first ones have begun."""
        self.hold()
        copies = self.submit(*keys)
        assert self._reached.wait(20)
        return copies

    def release(self) -> None:
        if self.link.driver is not None:
            self.link.driver.frozen = False  # type: ignore[attr-defined]
        self._go.set()


Make = Callable[[str], Attached]


@pytest.fixture
def make(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[Attached] = []

    def attach(name: str) -> Attached:
        made.append(Attached(CASES[name], stores, monkeypatch))
        return made[-1]

    yield attach
    for attached in made:
        attached.release()
        attached.link.close()
        attached.link.close()
    ours = ("expertcast-link", "expertcast-disk", "expertcast-decode")
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(ours)]


@pytest.mark.parametrize("name", CASES)
def test_blocks_arrive_and_are_counted(name: str, make: Make) -> None:
    at = make(name)
    link, size = at.link, at.store.layout.block_bytes
    copies = [*at.submit(3, 0), *at.submit(7, urgent=True)]
    for copy in copies:
        link.wait(copy)
    at.settle()
    assert all(link.poll(copy) and copy.error is None and at.holds(copy) for copy in copies)
    assert (link.copies, link.bytes_moved) == (3, 3 * size)
    assert link.busy_s > 0
    assert link.copy_s > 0
    assert (link.bytes_read > 0) is (link.name == "disk")
    link.reset()
    assert (link.copies, link.bytes_moved, link.bytes_read, link.busy_s) == (0, 0, 0, 0.0)


@pytest.mark.parametrize("name", QUEUED)
def test_urgent_ones_first_then_promoted_ones_and_never_dropped_ones(name: str, make: Make) -> None:
    at = make(name)
    link, begun = at.link, CASES[name].begun
    link.observer = Observer()
    link.observer.device_time = lambda event: event.record_made.time  # type: ignore[method-assign]
    copies = at.begin(*range(6))
    assert not link.cancel(copies[0]), "it is under way"
    assert link.cancel(copies[4])
    link.promote(copies[5])
    copies += at.submit(8, urgent=True)
    assert not copies[begun].done
    at.release()
    for copy in (copies[6], copies[5], *copies[:4]):
        link.wait(copy)
    at.settle()
    # a disk begins them in this order and decodes several at a time; other links complete them in this order
    *_, promoted, urgent = times = [copy.start if type(link) is DiskLink else copy.end for copy in copies]
    after, overtaking = times[begun:4], name == "disk on cuda, coded"  # two decode at once and may end in any order
    assert max(promoted, urgent) < sorted(after)[int(overtaking)]
    assert overtaking or after == sorted(after)
    assert all(at.holds(copy) for copy in copies if copy is not copies[4])
    assert copies[4].cancelled
    assert not at.pool.block(4).any()
    assert link.copies == 6


@pytest.mark.parametrize("urgent", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_a_failure_reaches_whoever_waits_and_nobody_else(name: str, urgent: bool, make: Make) -> None:
    """The link and its blocks still work."""
    at = make(name)
    fails = RaiseAt(0, OSError(5, "bus error"))
    at.patch(fails)
    for key in range(6):
        fails.count = 1
        (bad,) = at.submit(key, urgent=urgent)
        with pytest.raises((OSError, ExpertcastError), match="bus error"):
            at.link.wait(bad)
        assert bad.done
        assert not getattr(at.link, "_awaited", False)
    (good,) = at.submit(7, urgent=urgent)
    at.link.wait(good)
    at.settle()
    assert at.holds(good)
    assert at.link.copies == 1


class _Failing(Observer):
    def __init__(self, error: BaseException) -> None:
        self._raise = RaiseAt(2, error)

    def copied(self, key: int, layer: int, start: float, end: float, urgent: bool) -> None:
        self._raise()


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt()])
@pytest.mark.parametrize("name", CASES)
def test_an_observer_that_fails(name: str, error: BaseException, make: Make) -> None:
    """The observer's error is raised once in the model's thread, and no copy is lost."""
    at = make(name)
    at.link.observer = _Failing(error)
    copies = at.submit(0, 1, 2, urgent=True)
    for copy in copies:
        at.link.wait(copy)
    at.settle()
    with pytest.raises(type(error)):
        at.link.check()
    at.link.check()
    assert all(at.holds(copy) for copy in copies)
    assert at.link.copies == 3


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", QUEUED)
def test_closed_while_copies_are_under_way(name: str, again: bool, make: Make) -> None:
    """Started transfers end, the others are dropped; after a restart new ones are accepted."""
    at = make(name)
    copies = at.begin(*range(6))
    closing = threading.Thread(target=at.link.restart if again else at.link.close)
    closing.start()
    at.release()
    closing.join(20)
    assert not closing.is_alive()
    assert not copies[5].done
    assert not at.pool.block(5).any()
    if again:
        (new,) = at.submit(9, urgent=True)
        at.link.wait(new)
        at.settle()
        assert at.holds(new)


def _expanded(store: ExpertStore, key: int, precision: str) -> dict[str, Tensor]:
    """Return the parameters that the packed copy expands to."""
    block = torch.zeros(store.layout.block_bytes, dtype=torch.uint8)
    packed = store.copies(precision)
    packed.layout.expand(packed.block(key), block)
    return store.layout.views(block)


PACKING = [name for name in CASES if "file" not in name]


@pytest.mark.parametrize("name", PACKING)
def test_packed_bytes_move_and_become_blocks(name: str, make: Make) -> None:
    at = make(name)
    link, store = at.link, at.store
    copies = [
        link.submit(slot + 3, slot, urgent=True, precision=precision) for slot, precision in enumerate(PRECISIONS)
    ]
    copies.append(link.submit(9, 5, urgent=True))
    for copy in copies:
        link.wait(copy)
        at.settle()
        if copy.precision != FULL:
            link.expand(copy)
    for copy in copies[:-1]:
        for field, found in store.layout.views(at.pool.block(copy.slot)).items():
            assert torch.equal(found, _expanded(store, copy.key, copy.precision)[field])
    assert at.holds(copies[-1])
    sizes = [store.copies(precision).block_bytes for precision in PRECISIONS]
    assert (link.copies, link.bytes_moved) == (4, sum(sizes) + store.layout.block_bytes)
    assert [link.block_bytes(precision) for precision in (*PRECISIONS, FULL)] == [*sizes, store.layout.block_bytes]


# Instant and emulated links


@pytest.fixture
def memory(stores: Stores) -> ExpertStore:
    return stores["memory"]


def test_only_a_packed_copys_bytes_are_written(memory: ExpertStore) -> None:
    """Before the expansion a slot has the packed block and then its old bytes; afterwards the copy counts as read."""
    link, pool = InstantLink(), SlotPool(memory.layout, SLOTS, torch.device("cpu"))
    link.attach(memory, pool)
    pool.block(4).fill_(7)
    copy = link.submit(21, 4, urgent=True, precision="int2")
    size = memory.copies("int2").block_bytes
    assert torch.equal(pool.block(4)[:size], memory.copies("int2").block(21))
    assert bool((pool.block(4)[size:] == 7).all())
    read: list[list[int]] = []
    link.mark_read = read.append  # type: ignore[method-assign]
    link.expand(copy)
    assert read == [[4]]


def test_an_emulated_copy_starts_when_it_is_submitted(memory: ExpertStore) -> None:
    """The link's thread wakes up later, which costs no bandwidth."""
    link = EmulatedLink(memory.layout.block_bytes / 1e-3)
    link.attach(memory, SlotPool(memory.layout, SLOTS, torch.device("cpu")))
    times = iter([1.0])
    link.clock = lambda: next(times, 2.0)  # type: ignore[method-assign]
    copies = [link.submit(key, key, urgent=True) for key in range(2)]
    link.wait(copies[1])
    link.close()
    assert [(copy.start, copy.end) for copy in copies] == [(1.0, pytest.approx(1.001)), (2.0, pytest.approx(2.001))]


def test_an_emulated_copy_takes_as_long_as_its_bytes(memory: ExpertStore) -> None:
    """With one full block per millisecond and 0.1 ms latency, packed blocks take their share; the caller is free
    meanwhile.
    """
    full = memory.layout.block_bytes
    link = EmulatedLink(full / 1e-3, 1e-4)
    link.attach(memory, SlotPool(memory.layout, SLOTS, torch.device("cpu")))
    start = time.perf_counter()
    copies = [link.submit(1, slot, urgent=True, precision=name) for slot, name in enumerate((FULL, *PRECISIONS))]
    submitted = time.perf_counter() - start
    link.wait(copies[-1])
    took = time.perf_counter() - start
    link.close()
    expected = sum(1e-4 + link.block_bytes(name) / full * 1e-3 for name in (FULL, *PRECISIONS))
    assert link.busy_s == pytest.approx(expected, rel=1e-6)
    assert took > 0.99 * expected
    assert submitted < took
    assert link.copy_s == pytest.approx(1.1e-3)


def test_a_measured_copys_time_is_that_of_a_full_one(memory: ExpertStore) -> None:
    """Copies of 1/2 and 1/4 of a block take 3 s together, so a whole block takes 4."""
    link = InstantLink()
    link.attach(memory, SlotPool(memory.layout, 1, torch.device("cpu")))
    assert link.copy_s == 0.0
    link.bytes_moved, link.busy_s, link.copies = memory.layout.block_bytes * 3 // 4, 3.0, 2
    assert link.copy_s == pytest.approx(4.0)


@pytest.mark.parametrize(("device", "kind"), [("cpu", InstantLink), ("cuda", CudaLink)])
def test_the_link_that_auto_takes(device: str, kind: type[Link]) -> None:
    assert type(make_link(OffloadConfig(), device)) is kind
