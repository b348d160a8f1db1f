"""The pools: by hand, against their slowest form, and what no step may break."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from expertcast.runtime.pools.cache import PoolCache, Pools, Ranking
from expertcast.runtime.pools.states import POOLS, ExpertBytes, State

SIZE = ExpertBytes(plane=100, exponents=40)
F, C, S, E, M = State


def states(cache: PoolCache, experts: int) -> str:
    return "".join(cache.state(expert).name for expert in range(experts))


def test_by_hand() -> None:
    """Room for one of F, one of C, one of E; no margin, plain counts.

    0 is used: rank 0, so F. 1: rank 1, C. 2: rank 2, E. 2 again: rank 0, F. 0 is driven out; it has no shards and waits
    in pool C as S. Its 100 bytes and the 140 of 1 are too many there, and 1 ranks behind 0: it goes on to E. 0 again:
    rank 0 of equals, F; 2 is driven out to C, as S.
    3 is used once: rank 3, behind every pool.
    """
    memory = {F: 200, C: 140, E: 40}
    cache = PoolCache(5, size=SIZE, memory=memory, margin=0, fade=1)
    held = []
    for expert in (0, 1, 2, 2, 0, 3):
        changed = cache.use([expert])
        held.append(states(cache, 5))
    assert held == ["FMMMM", "FCMMM", "FCEMM", "SEFMM", "FESMM", "FESMM"]
    assert changed == {}
    cache.use([2])
    assert cache._held == [200, 100, 0, 40]
    cache.clear()
    assert states(cache, 5) == "MMMMM"
    assert not any(cache._held)
    cache.use([3])
    assert states(cache, 5) == "MMMEM", "counts stay: third behind 2 and 0, before 1"


def test_layers_share_the_room_and_no_more() -> None:
    """Three layers use all experts: together they hold as many as there is room for."""
    pools = Pools(layers=3, experts=8, size=SIZE, room={F: 4, C: 2, S: 5, E: 1})
    for layer in range(3):
        pools.use(layer, range(8 * layer, 8 * layer + 8))
    found = [pools.state(key) for key in range(24)]
    assert [found.count(state) for state in POOLS] == [4, 2, 5, 1]


def test_the_margin_fills_room_that_better_ranks_leave() -> None:
    """0 ranks first and is not held. 1 and 2 follow: 2 is third, and in a pool of two only with a margin."""
    held = []
    for margin in (0, 1):
        cache = PoolCache(4, size=SIZE, memory={F: 400}, margin=margin, fade=1)
        cache.use([0])
        cache.use([0])
        cache.clear()
        cache.use([1, 2])
        held.append(states(cache, 4))
    assert held == ["MFMM", "MFFM"]


def test_what_was_just_decoded_has_all_its_parts() -> None:
    """1 is read and tried for F with a margin; 0 is used more and stays: 1 goes on to C as C, not as S."""
    cache = PoolCache(4, size=SIZE, memory={F: 200, C: 140}, margin=1, fade=1)
    for experts in ([0], [0], [1]):
        cache.use(experts)
    assert states(cache, 4) == "FCMM"


class Slow:
    """The same rules with a sort at every decision."""

    def __init__(self, experts: int, memory: Mapping[State, int], margin: int, fade: float) -> None:
        self.memory, self.margin, self.fade = memory, margin, fade
        self.uses = [0.0] * experts
        self.state = [M] * experts
        self.pool: dict[int, State] = {}
        self.used = [pool for pool in POOLS if memory.get(pool, 0) >= SIZE.held(pool)]

    def order(self, expert: int) -> tuple[float, int]:
        return (-self.uses[expert], expert)

    def lose(self, expert: int) -> None:
        self.state[expert] = M
        self.pool.pop(expert, None)

    def use(self, experts: list[int]) -> None:
        found = {expert: self.state[expert] for expert in experts}
        self.uses = [count * self.fade for count in self.uses]
        for expert in experts:
            self.uses[expert] += 1
            self.lose(expert)
        for expert in sorted(experts, key=self.order):
            rank = sorted(range(len(self.uses)), key=self.order).index(expert)
            end = self.margin
            for pool in self.used:
                end += self.memory[pool] // SIZE.held(pool)
                if rank < end:
                    at = F if found[expert] is F and pool in (C, E) else pool
                    self.state[expert], self.pool[expert] = at, at
                    self.drive_out(found)
                    break

    def drive_out(self, found: dict[int, State]) -> None:
        for index, pool in enumerate(self.used):
            while sum(SIZE.held(self.state[e]) for e in self.inside(pool)) > self.memory[pool]:
                victim = max(self.inside(pool), key=self.order)
                parts = "XP" if found.get(victim, F) is not F else {F: "P", C: "XP", S: "P", E: "X"}[self.state[victim]]
                del self.pool[victim]
                self.state[victim] = M
                if index + 1 < len(self.used):
                    lower = self.used[index + 1]
                    wanted = {C: "XP", S: "P", E: "X"}[lower]
                    if set(wanted) <= set(parts):
                        self.state[victim] = lower
                    elif lower is C and parts == "P":
                        self.state[victim] = S
                    if self.state[victim] is not M:
                        self.pool[victim] = lower

    def inside(self, pool: State) -> list[int]:
        return [expert for expert, at in self.pool.items() if at is pool]


@pytest.mark.parametrize("fade", [1.0, 0.9375])
def test_against_the_slowest_form(fade: float) -> None:
    """A fade that is a sum of few powers of two keeps both forms' counts in the same order."""
    choose, kinds = random.Random(5), set()
    for _ in range(120):
        experts, margin = choose.randint(3, 12), choose.randint(0, 2)
        memory = {pool: choose.choice([0, 0, 150, 290, 500, 640]) for pool in POOLS}
        cache = PoolCache(experts, size=SIZE, memory=memory, margin=margin, fade=fade)
        slow = Slow(experts, memory, margin, fade)
        for step in range(40):
            if step % 8 == 7:  # a slot is taken away: what ranks behind it is full still
                lost = choose.randrange(experts)
                cache.lose(lost)
                slow.lose(lost)
            used = choose.sample(range(experts), choose.randint(1, 3))
            before = [cache.state(expert) for expert in range(experts)]
            changed = cache.use(used)
            slow.use(used)
            after = [cache.state(expert) for expert in range(experts)]
            assert after == slow.state
            assert changed == {e: new for e, (old, new) in enumerate(zip(before, after, strict=True)) if old != new}
            assert all(held <= memory[pool] for pool, held in zip(POOLS, cache._held, strict=True))
            assert sum(cache._held) == sum(SIZE.held(state) for state in after)
            kinds |= {(old.name, new.name) for old, new in zip(before, after, strict=True)}
            for expert, (old, new) in enumerate(zip(before, after, strict=True)):
                assert expert in used or (old, new) not in {(F, C), (F, E), (S, C), (S, F), (M, F), (E, C)}
    assert {("M", "F"), ("M", "C"), ("F", "S"), ("C", "S"), ("C", "E"), ("S", "C"), ("F", "M")} <= kinds


def test_a_ranking_in_the_long_run() -> None:
    """Counts that fade are brought back to size, and their order is that of plain sums."""
    choose, ranking = random.Random(6), Ranking(6, fade=0.5)
    counts = [0.0] * 6
    for step in range(1500):
        used = choose.sample(range(6), 2)
        ranking.use(used)
        counts = [count / 2 + (expert in used) for expert, count in enumerate(counts)]
        if step % 50 == 0:
            ranks = sorted(range(6), key=lambda expert: (-counts[expert], expert))
            assert [ranking.rank(expert) for expert in ranks] == list(range(6))
