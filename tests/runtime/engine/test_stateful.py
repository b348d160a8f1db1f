"""Slot pool, policy, residency and link under random schedules: what must hold whatever comes when.

The machine of `residency_machine.py` runs over two links: `SteppedLink`, whose copies go on by as many half blocks as
the schedule says at every one of the link's calls (so each interleaving can be reached, and reached again), and the
real `EmulatedLink` with random delays. A machine of its own checks the order in which `EmulatedLink` starts copies.
"""

from __future__ import annotations

import threading
from collections.abc import Container
from typing import Any

import pytest
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

from expertcast.runtime.links.base import Link
from expertcast.runtime.links.emulated import EmulatedLink
from expertcast.runtime.policies import EvictionPolicy
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.transfer import State, Transfer
from tests.runtime.engine.residency_machine import (
    EXPERTS,
    LAYERS,
    PACE,
    LoggedPolicy,
    ResidencyMachine,
    canary,
    canary_store,
    logged,
)
from tests.runtime.links.manual import SteppedLink

PROFILE = settings(
    derandomize=True, database=None, deadline=None, stateful_step_count=50, suppress_health_check=list(HealthCheck)
)
COPIES = 24


class SteppedMachine(ResidencyMachine):
    make_link = logged(SteppedLink)


class EmulatedMachine(ResidencyMachine):
    make_link = staticmethod(lambda: logged(EmulatedLink)(1e12, jitter=3e-4, seed=5))


def test_any_interleaving() -> None:
    run_state_machine_as_test(SteppedMachine, settings=settings(PROFILE, max_examples=150))


def test_random_delays() -> None:
    once = settings(PROFILE, max_examples=40, phases=[Phase.generate])  # no run is like another
    run_state_machine_as_test(EmulatedMachine, settings=once)


class _Gate:
    """Stands before every half block that the link's thread moves, and opens when told."""

    def __init__(self, link: EmulatedLink) -> None:
        self._move = link._move
        link._move = self._wait  # type: ignore[method-assign]
        self._reached, self._open = threading.Semaphore(0), threading.Semaphore(0)
        self._removed = False
        self.key: int | None = None
        """Whose half block stands before the gate."""

    def _wait(self, copy: Transfer, *rest: int | None) -> None:
        if not self._removed:
            self.key = copy.key
            self._reached.release()
            self._open.acquire()
        self._move(copy, *rest)

    def reached(self) -> None:
        assert self._reached.acquire(timeout=10), "the link's thread stands still"

    def open(self) -> None:
        self.key = None
        self._open.release()

    def remove(self) -> None:
        self._removed = True
        self.open()


class LinkMachine(RuleBasedStateMachine):
    """The real emulated link, its thread moving half a block when told: order, cancellation, arrival."""

    @initialize()
    def set_up(self) -> None:
        store = canary_store()
        self.pool = SlotPool(store.layout, COPIES, torch.device("cpu"))
        self.link = EmulatedLink(1e12)
        self.link.attach(store, self.pool)
        self.gate = _Gate(self.link)
        self.queued: list[Transfer] = []
        self.under_way: Transfer | None = None
        self.half = False
        self.arrived: list[Transfer] = []
        self.dropped: list[Transfer] = []

    @rule(urgent=st.booleans())
    @precondition(lambda self: self.count < COPIES)
    def submit(self, urgent: bool) -> None:
        self.queued.append(self.link.submit(self.count, self.count, urgent=urgent))
        self.picked()

    @rule(data=st.data())
    @precondition(lambda self: self.queued or self.under_way)
    def cancel(self, data: st.DataObject) -> None:
        copy = data.draw(st.sampled_from([*self.queued, *([self.under_way] if self.under_way else [])]))
        assert self.link.cancel(copy) == (copy is not self.under_way), "what has started is not dropped, the rest is"
        if copy is not self.under_way:
            self.queued.remove(copy)
            self.dropped.append(copy)

    @rule(data=st.data())
    @precondition(lambda self: self.queued)
    def promote(self, data: st.DataObject) -> None:
        self.link.promote(data.draw(st.sampled_from(self.queued)))

    @rule()
    @precondition(lambda self: self.under_way is not None)
    def step(self) -> None:
        """Half a block moves."""
        copy = self.under_way
        assert copy is not None
        self.gate.open()
        if not self.half:
            self.half = True
            self.gate.reached()
            assert self.gate.key == copy.key, "one copy at a time"
            assert not copy.done
            return
        self.link.wait(copy)
        self.under_way, self.half = None, False
        self.arrived.append(copy)
        self.picked()

    @rule(data=st.data())
    @precondition(lambda self: self.arrived)
    def wait_again(self, data: st.DataObject) -> None:
        self.link.wait(data.draw(st.sampled_from(self.arrived)))

    @invariant()
    @precondition(lambda self: hasattr(self, "link"))
    def arrived_whole_or_not_at_all(self) -> None:
        for copy in self.arrived:
            assert copy.done
            assert self.link.poll(copy)
            assert (self.pool.block(copy.slot).view(torch.int32) == canary(copy.key)).all()
        for copy in (*self.queued, *self.dropped):
            assert not copy.done
            assert not self.pool.block(copy.slot).any()

    @property
    def count(self) -> int:
        return len(self.queued) + len(self.arrived) + len(self.dropped) + (self.under_way is not None)

    def picked(self) -> None:
        """The thread takes up its next copy as soon as there is one: which one?"""
        if self.under_way is not None or not self.queued:
            return
        self.gate.reached()
        self.under_way = next(copy for copy in self.queued if copy.key == self.gate.key)
        assert self.under_way.started
        assert self.under_way.urgent or not any(copy.urgent for copy in self.queued), "forecasts come after misses"
        if not self.under_way.urgent:
            assert self.under_way is self.queued[0], "forecasts come in the order in which they were asked for"
        self.queued.remove(self.under_way)

    def teardown(self) -> None:
        if not hasattr(self, "link"):
            return
        queued = [*self.queued, *([self.under_way] if self.under_way else [])]
        self.gate.remove()
        for copy in queued:
            self.link.wait(copy)
        self.link.close()
        self.arrived += queued
        assert self.link.copies == len(self.arrived)
        assert self.link.bytes_moved == len(self.arrived) * self.pool.layout.block_bytes


def test_order_of_the_emulated_link() -> None:
    run_state_machine_as_test(LinkMachine, settings=settings(PROFILE, max_examples=60))


class _HastyLink(SteppedLink):
    """Compute is not made to wait."""

    def wait(self, copy: Transfer) -> None:
        self._go_on()


class _LyingLink(SteppedLink):
    """Says that a copy was dropped though it is under way."""

    def cancel(self, copy: Transfer) -> bool:
        return super().cancel(copy) or not copy.done


class _DeafLink(SteppedLink):
    """Leaves needed copies behind forecasts."""

    def promote(self, copy: Transfer) -> None:
        self._go_on()


class _EarlyLink(SteppedLink):
    """Says that a copy has arrived when half of it has."""

    def start(self, copy: Transfer) -> None:
        super().start(copy)
        copy.state = State.DONE


class _CarelessPolicy(LoggedPolicy):
    """Gives up what is needed."""

    def victim(self, protected: Container[int]) -> int | None:
        return super().victim(())


class _ForgetfulPolicy(LoggedPolicy):
    """Gives up what is needed by forecasts and layers if only its copy has arrived."""

    def victim(self, protected: Container[int]) -> int | None:
        return next((key for key in self._order if key in protected), None)


@pytest.mark.parametrize("broken", [_HastyLink, _LyingLink, _DeafLink, _EarlyLink, _CarelessPolicy, _ForgetfulPolicy])
def test_broken_rules_are_seen(broken: type[Any]) -> None:
    """The machine can fail: one rule broken at a time."""

    class Broken(ResidencyMachine):
        make_link = logged(broken if issubclass(broken, Link) else SteppedLink)
        policy_class = broken if issubclass(broken, EvictionPolicy) else LoggedPolicy

    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(Broken, settings=settings(PROFILE, max_examples=120, phases=[Phase.generate]))


class FilledMachine(ResidencyMachine):
    make_link: Any = logged(SteppedLink)

    @rule(keys=st.lists(st.integers(0, LAYERS * EXPERTS - 1), max_size=9, unique=True), pace=PACE)
    @precondition(lambda self: not self.running)
    def fill(self, keys: list[int], pace: list[int]) -> None:
        with self.acting(pace):
            held, free = list(self.pool.slots), len(self.pool.free_slots)
            missing = [key for key in keys if key not in held][:free]
            assert self.residency.fill(keys) == len(missing)
            failed = {copy.key for copy in self.log.copies if copy.error is not None}
            kept = [key for key in held if key in self.pool.slots]
            assert list(self.pool.slots) == kept + missing
            assert failed.issuperset(set(held).difference(kept)), "only what others asked for, and did not get"
            assert not self.residency.copies


def test_slots_filled_between_any_copies() -> None:
    run_state_machine_as_test(FilledMachine, settings=settings(PROFILE, max_examples=100))


def test_a_fill_that_does_not_wait_is_seen() -> None:
    class Hasty(SteppedLink):
        def wait(self, copy: Transfer) -> None:
            self._go_on()

    class Broken(FilledMachine):
        make_link = logged(Hasty)

    with pytest.raises(AssertionError):
        run_state_machine_as_test(Broken, settings=settings(PROFILE, max_examples=60, phases=[Phase.generate]))
