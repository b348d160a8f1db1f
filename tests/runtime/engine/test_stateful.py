"""Slot pool, policy, residency and link under random schedules: what must hold whatever comes when.

The machine drives `ExpertCache` as the engine does and checks its books at every step. Model: 4 layers of 8 experts,
keys layer * 8 + expert. Every byte of expert e of layer l says who it is (its block is filled with the number
l * 1000 + e), so that reading a slot tells whose bytes lie there, and whether all of them do. Calls come in the
engine's order: start_layer, request, then chunk by chunk request the next, wait, read, release; with prefetches,
changed routings, cut-short forwards and failing copies at any point between.

It runs over two links: `SteppedLink`, whose copies go on by as many half blocks as the schedule says at every one of
the link's calls (so each interleaving can be reached, and reached again), and the real `EmulatedLink` with random
delays.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from expertcast.data.moe_layers import find_moe_layers
from expertcast.runtime.engine.cache import ExpertCache
from expertcast.runtime.links.base import Link
from expertcast.runtime.links.emulated import EmulatedLink
from expertcast.runtime.policies import LRU, CacheShape, EvictionPolicy
from expertcast.runtime.recording.recorder import RunStatistics
from expertcast.runtime.storage.layout import FULL
from expertcast.runtime.storage.slots import SlotPool, SlotState
from expertcast.runtime.storage.store import ExpertStore
from expertcast.runtime.storage.transfer import Transfer
from tests.families.models import tiny_model
from tests.runtime.engine.evictions import eviction
from tests.runtime.links.manual import SteppedLink

LAYERS, EXPERTS = 4, 8
EXPERTS_OF_A_LAYER = st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=EXPERTS, unique=True)
PACE = st.lists(st.integers(0, 3), max_size=8)


def canary(key: int) -> int:
    return key // EXPERTS * 1000 + key % EXPERTS


@functools.cache
def canary_store() -> ExpertStore:
    view = find_moe_layers(tiny_model("qwen3_moe"))
    store = ExpertStore(view)
    store.pack(view)
    for key in range(LAYERS * EXPERTS):
        store.block(key).view(torch.int32).fill_(canary(key))
    return store


class _Log:
    """Every copy that was asked for, and what became of it; the machine's own books."""

    def __init__(self) -> None:
        self.copies: list[Transfer] = []
        self.forecasts: list[Transfer] = []
        self.dropped: list[Transfer] = []

    def active(self) -> list[Transfer]:
        """Neither arrived nor dropped."""
        return [copy for copy in self.copies if not copy.done and copy not in self.dropped]


def logged(base: type[Link]) -> type[Any]:
    """The link with its submissions and cancellations on record."""

    class Logged(base):  # type: ignore[misc, valid-type]
        log: _Log

        def submit(self, key: int, slot: int, *, urgent: bool, precision: str = FULL) -> Transfer:
            assert all(copy.slot != slot for copy in self.log.active()), "two copies into one slot"
            copy: Transfer = super().submit(key, slot, urgent=urgent, precision=precision)
            self.log.copies.append(copy)
            if not urgent:
                self.log.forecasts.append(copy)
            return copy

        def cancel(self, copy: Transfer) -> bool:
            dropped: bool = super().cancel(copy)
            if dropped:
                self.log.dropped.append(copy)
            return dropped

    return Logged


class LoggedPolicy(LRU):
    """Knows what it was told is resident."""

    def __init__(self, config: Any, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self.keys: set[int] = set()

    def insert(self, key: int, full: bool = True) -> None:
        assert key not in self.keys
        self.keys.add(key)
        super().insert(key, full)

    def remove(self, key: int) -> None:
        self.keys.remove(key)
        super().remove(key)


class ResidencyMachine(RuleBasedStateMachine):
    """One forward after another, cut short at times."""

    make_link: Callable[[], Any]
    policy_class: type[EvictionPolicy] = LoggedPolicy

    @initialize(slots=st.integers(2, 9), keep=st.booleans())
    def set_up(self, slots: int, keep: bool) -> None:
        store = canary_store()
        self.pool = SlotPool(store.layout, slots, torch.device("cpu"))
        self.link = type(self).make_link()
        self.link.log = self.log = _Log()
        self.link.attach(store, self.pool)
        self.stats = RunStatistics(LAYERS)
        policies = eviction(type(self).policy_class, layers=LAYERS, experts=EXPERTS, slots=slots)
        (self.policy,) = policies.policies
        self.residency = ExpertCache(self.pool, self.link, policies, self.stats, experts=EXPERTS, keep=keep)
        self.slots, self.keep = slots, keep
        self.layer = LAYERS - 1
        self.forget()

    def forget(self) -> None:
        """No layer runs."""
        self.chunks: list[list[int]] = []
        """Chunks of the running layer that are not released; empty when none runs."""
        self.held: set[int] = set()
        """Requested and not released: never to be evicted."""
        self.reading: list[int] = []
        """Waited for and not released."""
        self.routed = -1

    @property
    def running(self) -> bool:
        return bool(self.chunks)

    # rules: what the engine does ---------------------------------------------------------------------------------

    @rule(right=st.integers(0, EXPERTS), experts=EXPERTS_OF_A_LAYER, pace=PACE)
    @precondition(lambda self: not self.running)
    def route(self, right: int, experts: list[int], pace: list[int]) -> None:
        """The next layer's router ran: so many of its forecast's experts, and some others."""
        self.layer = (self.layer + 1) % LAYERS
        forecast = [key % EXPERTS for key in self.pool.slots if key // EXPERTS == self.layer]
        self.begin(self.layer, list(dict.fromkeys(forecast[:right] + experts[: 1 + right % 4])), pace)

    @rule(experts=EXPERTS_OF_A_LAYER, pace=PACE)
    @precondition(lambda self: self.routed >= 0 and not self.reading)
    def route_again(self, experts: list[int], pace: list[int]) -> None:
        """Another hook changed the routing after the first chunk was asked for."""
        self.held.clear()
        self.begin(self.routed, experts, pace, again=True)

    @rule(ahead=st.sampled_from([1, 1, 1, 2, 0]), experts=EXPERTS_OF_A_LAYER, pace=PACE)
    def forecast(self, ahead: int, experts: list[int], pace: list[int]) -> None:
        first = (self.layer + ahead) % LAYERS * EXPERTS
        with self.acting(pace):
            self.residency.prefetch([first + expert for expert in experts])

    @rule(pace=PACE)
    @precondition(lambda self: self.running and not self.reading)
    def wait(self, pace: list[int]) -> None:
        """The next chunk is asked for while this one is waited for; from then on compute may read."""
        with self.acting(pace):
            if len(self.chunks) > 1:
                self.request(self.chunks[1])
            self.residency.wait(self.chunks[0])
            self.reading, self.routed = self.chunks[0], -1

    @rule(pace=PACE)
    @precondition(lambda self: self.reading)
    def release(self, pace: list[int]) -> None:
        with self.acting(pace):
            self.read()
            self.held.difference_update(self.reading)
            self.residency.release(self.reading)
            self.reading = []
            del self.chunks[0]

    @rule(experts=EXPERTS_OF_A_LAYER, right=st.integers(0, EXPERTS), pace=PACE)
    @precondition(lambda self: not self.running)
    def run_layer(self, experts: list[int], right: int, pace: list[int]) -> None:
        """From router to output, with a forecast for the next layer on the way."""
        self.route(right, experts, pace)
        self.forecast(1, experts[::-1], pace[::-1])
        while self.running:
            self.wait(pace)
            if self.reading:
                self.release([])

    @rule(pace=PACE, really=st.integers(0, 2))
    def cut_short(self, pace: list[int], really: int) -> None:
        """A forward raised, or a new one starts."""
        if really < 2:
            return
        with self.acting(pace):
            self.forget()
            self.residency.abandon()

    # rules: what the link does -----------------------------------------------------------------------------------

    @rule(steps=st.integers(1, 6))
    def time_passes(self, steps: int) -> None:
        if isinstance(self.link, SteppedLink):
            self.link.step(steps)
        else:
            time.sleep(steps * 2e-5)

    @rule()
    @precondition(lambda self: isinstance(self.link, SteppedLink))
    def a_copy_will_fail(self) -> None:
        self.link.failing = 1

    @rule()
    @precondition(lambda self: isinstance(self.link, SteppedLink))
    def a_copy_will_be_refused(self) -> None:
        self.link.refusing = 1

    # what must hold ----------------------------------------------------------------------------------------------

    @invariant()
    @precondition(lambda self: hasattr(self, "pool"))
    def one_key_one_slot(self) -> None:
        slots = dict(self.pool.slots)
        assert len(set(slots.values())) == len(slots), "a slot with two keys"
        assert set(self.pool.slots) == set(slots)
        for slot in range(self.slots):
            key = self.pool.key_of(slot)
            assert (key is None) == (self.pool.state(slot) is SlotState.FREE)
            assert key is None or slots[key] == slot
        assert len(self.pool.free_slots[0]) == self.slots - len(slots)

    @invariant()
    @precondition(lambda self: hasattr(self, "pool"))
    def books_agree(self) -> None:
        assert self.policy.keys == set(self.pool.slots)
        for copy in self.log.active():
            state = self.pool.state(copy.slot)  # before `done`: a thread may set it in between
            if not copy.done:
                assert self.pool.slots.get(copy.key) == copy.slot, f"a copy of {copy.key} into a slot of another"
                assert state is SlotState.LOADING

    @invariant()
    @precondition(lambda self: hasattr(self, "pool"))
    def requested_experts_stay(self) -> None:
        assert self.held <= set(self.pool.slots)
        for key in self.reading:
            assert self.pool.state(self.pool.slots[key]) is SlotState.IN_USE
        in_use = [slot for slot in range(self.slots) if self.pool.state(slot) is SlotState.IN_USE]
        assert {self.pool.key_of(slot) for slot in in_use} == set(self.reading)
        for copy in self.log.active():
            assert copy.urgent or copy.started or copy.key not in self.held, "a needed copy waits behind forecasts"

    @invariant()
    @precondition(lambda self: hasattr(self, "pool"))
    def slots_hold_what_they_say(self) -> None:
        self.read()
        for key, slot in self.pool.slots.items():
            if self.pool.state(slot) is SlotState.READY:
                self.check_bytes(key)

    @invariant()
    @precondition(lambda self: hasattr(self, "pool"))
    def statistics_add_up(self) -> None:
        total, block = self.stats.total, self.pool.layout.block_bytes
        assert total.requests == total.hits + total.misses
        assert total.bytes_moved == block * (len(self.log.copies) - len(self.log.dropped))
        assert self.link.bytes_moved == block * self.link.copies
        assert total.bytes_moved == block * (self.link.copies + len(self.log.active())) or self.link_counts_late()
        dropped = [copy for copy in self.log.dropped if not copy.urgent]
        assert total.dropped == len(dropped)
        for layer in self.stats.layers:
            assert 0 <= layer.prefetched_in_time <= layer.prefetched_used <= layer.prefetched
        assert total.prefetched == len(self.log.forecasts) - len(dropped)

    def teardown(self) -> None:
        if not hasattr(self, "link"):
            return
        self.link.close()
        assert not any(copy.done for copy in self.log.dropped), "a dropped prefetch arrived"

    # helpers -----------------------------------------------------------------------------------------------------

    def link_counts_late(self) -> bool:
        """A thread counts a copy and sets `done` one after the other."""
        return isinstance(self.link, EmulatedLink)

    def begin(self, layer: int, experts: list[int], pace: list[int], again: bool = False) -> None:
        keys = [layer * EXPERTS + expert for expert in experts]
        with self.acting(pace):
            self.residency.start_layer(layer, keys)
            for copy in self.log.active():
                useless = not again and copy.key // EXPERTS == layer and copy.key not in keys
                assert copy.started or copy.urgent or not useless, "a prefetch that became useless is still queued"
            self.chunks = self.split(keys)
            self.routed = layer
            self.request(self.chunks[0])

    def split(self, keys: list[int]) -> list[list[int]]:
        """As the engine does."""
        if len(keys) <= self.slots:
            return [keys]
        keys = sorted(keys, key=lambda key: (not self.residency.holds(key), key))
        size = max(1, self.slots // 2)
        return [keys[start : start + size] for start in range(0, len(keys), size)]

    def request(self, keys: Sequence[int]) -> None:
        misses = self.stats.total.misses
        missing = [key for key in keys if not self.residency.holds(key)]
        before = len(self.log.copies)
        self.residency.request(keys)
        assert [copy.key for copy in self.log.copies[before:]] == missing, "each missing expert once, no other"
        assert self.stats.total.misses == misses + len(missing)
        self.held.update(keys)

    def acting(self, pace: list[int]) -> _Acting:
        return _Acting(self, pace)

    def read(self) -> None:
        """Compute reads its slots."""
        for key in self.reading:
            self.check_bytes(key)

    def check_bytes(self, key: int) -> None:
        block = self.pool.block(self.pool.slots[key]).view(torch.int32)
        assert (block == canary(key)).all(), f"slot of {canary(key)} holds {block.unique().tolist()}"


class _Acting:
    """One action of the model's thread: the link keeps pace, and no expert that has a slot is copied again.

    A failing copy ends the forward, as it does in the engine.
    """

    def __init__(self, machine: ResidencyMachine, pace: list[int]) -> None:
        self.machine, self.pace = machine, pace

    def __enter__(self) -> None:
        machine = self.machine
        if isinstance(machine.link, SteppedLink):
            machine.link.pace.extend(self.pace)
        self.resident = set(machine.pool.slots)
        self.copies = len(machine.log.copies)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        machine = self.machine
        for copy in machine.log.copies[self.copies :]:
            assert copy.key not in self.resident or any(
                lost.key == copy.key for lost in machine.log.copies[: self.copies] if lost.error is not None
            ), f"{copy.key} had a slot and is copied again"
        if isinstance(machine.link, SteppedLink):
            machine.link.pace.clear()
        if isinstance(error, OSError):
            machine.forget()
            machine.residency.abandon()
            return True
        return False


PROFILE = settings(
    derandomize=True, database=None, deadline=None, stateful_step_count=50, suppress_health_check=list(HealthCheck)
)


class SteppedMachine(ResidencyMachine):
    make_link = logged(SteppedLink)


class EmulatedMachine(ResidencyMachine):
    make_link = staticmethod(lambda: logged(EmulatedLink)(1e12, jitter=3e-4, seed=5))


def test_any_interleaving() -> None:
    run_state_machine_as_test(SteppedMachine, settings=settings(PROFILE, max_examples=120))


def test_random_delays() -> None:
    once = settings(PROFILE, max_examples=20, phases=[Phase.generate])  # no run is like another
    run_state_machine_as_test(EmulatedMachine, settings=once)
