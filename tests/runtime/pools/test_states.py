"""Parts and bytes of experts in each state, and the makespan of reads in order by the tick."""

from __future__ import annotations

import random

from expertcast.runtime.pools.states import Costs, ExpertBytes, State, pools_text
from tests.runtime.pools.made import makespan

F, C, S, E, M = State


def ticked(states: list[State], costs: Costs) -> float:
    """Whole seconds, one after another."""
    reads = []
    for state in states:
        reads += [int(costs.shard_s)] * (costs.shards * (state in (S, M))) + [-int(costs.read_s)] * (state in (E, M))
    there = costs.shards * sum(state in (C, E) for state in states)
    ends: list[int] = []
    now, read_end = 0, abs(reads[0]) if reads else 0
    while reads or there or ends:
        ends = [end for end in ends if end > now]
        while reads and read_end == now:
            there += reads.pop(0) > 0
            read_end += abs(reads[0]) if reads else 0
        while there and len(ends) < costs.threads:
            there -= 1
            ends.append(now + int(costs.decode_s))
        if reads or there or ends:
            now += 1
    return now


def test_the_makespan_against_one_that_ticks() -> None:
    choose = random.Random(4)
    for _ in range(400):
        costs = Costs(
            read_s=choose.choice([2, 4, 6]), ratio=choose.choice([1, 2]), decode_s=choose.randint(1, 7),
            shards=choose.choice([1, 2]), threads=choose.randint(1, 3),
        )  # fmt: skip
        states = [choose.choice(list(State)) for _ in range(choose.randint(1, 5))]
        assert makespan(states, costs) == ticked(states, costs)


def test_what_each_state_takes() -> None:
    size = ExpertBytes(plane=100, exponents=37)
    assert {state.name: size.held(state) for state in State} == {"F": 200, "C": 137, "S": 100, "E": 37, "M": 0}
    assert pools_text({E: 300_000, F: 4_000_000, S: 0, C: 2_000_000}) == "C=2000000,E=300000"
