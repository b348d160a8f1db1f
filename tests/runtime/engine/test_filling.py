"""Slots filled before a text, between layers and copies in any state: nobody loses one, and all have arrived."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from expertcast.runtime.links.base import Copy
from tests.runtime.engine.residency_machine import EXPERTS, LAYERS, PACE, ResidencyMachine, logged
from tests.runtime.engine.test_stateful import PROFILE
from tests.runtime.links.manual import SteppedLink


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


def test_any_interleaving() -> None:
    run_state_machine_as_test(FilledMachine, settings=settings(PROFILE, max_examples=100))


def test_a_link_that_does_not_wait_is_seen() -> None:
    class Hasty(SteppedLink):
        def wait(self, copy: Copy) -> None:
            self._go_on()

    class Broken(FilledMachine):
        make_link = logged(Hasty)

    with pytest.raises(AssertionError):
        run_state_machine_as_test(Broken, settings=settings(PROFILE, max_examples=60, phases=[Phase.generate]))
