"""Orders of reads and decodings: the makespan by the tick, the scheduler against the optimum and the lower bounds."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from functools import cache
from math import ceil, factorial, prod

import pytest

from expertcast.runtime.pools.states import Costs, ExpertBytes, State, pools_text, schedule
from tests.runtime.pools.made import makespan

INSTANCES, MOST = 1000, 600
F, C, S, E, M = State


@cache
def orders(counts: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Every order of so many of 0, so many of 1, ..."""
    if not any(counts):
        return [()]
    fewer = ((item, (*counts[:item], count - 1, *counts[item + 1 :])) for item, count in enumerate(counts) if count)
    return [(item, *rest) for item, left in fewer for rest in orders(left)]


def optimum(states: list[State], costs: Costs) -> float | None:
    """The smallest makespan over every order of reads; None if more than `MOST` would be tried.

    Shards are alike, so a thread that is free takes any; a disk or a thread that pauses gains nothing.
    """
    shards = costs.shards * sum(state.reads_exponents for state in states)
    planes = sum(state.reads_mantissas for state in states)
    if factorial(shards + planes) // prod(map(factorial, (shards, planes))) > MOST:
        return None
    held = costs.shards * sum(state.decodes and not state.reads_exponents for state in states)
    return min(_takes(order, held, costs) for order in orders((shards, planes)))


def _takes(order: tuple[int, ...], held: int, costs: Costs) -> float:
    clock, free = 0.0, [0.0] * costs.threads
    for _ in range(held):
        heapq.heapreplace(free, free[0] + costs.decode_s)
    for kind in order:
        clock += (costs.shard_s, costs.read_s)[kind]
        if kind == 0:
            heapq.heapreplace(free, max(free[0], clock) + costs.decode_s)
    return max(clock, *free)


def lower_bound(states: list[State], costs: Costs) -> float:
    """The makespan of any order is at least this (ZipMoE, Lemma B.3): all reads, all decodings shared evenly, and the
    longest that a single expert takes alone.

    The last is mended. The paper has all shards read before the first is decoded; decoding may begin when the first of
    several has been read, so that for K > 1 the optimum can be below it.
    """
    read = [costs.read_s * (costs.ratio * state.reads_exponents + state.reads_mantissas) for state in states]
    decodings = costs.shards * sum(state.decodes for state in states) * costs.decode_s
    return max(sum(read), decodings / costs.threads, *read, *(_alone(state, costs) for state in states))


def _alone(state: State, costs: Costs) -> float:
    """Until all shards of an expert have been decoded: after the first one was read all of them are decoded in rounds,
    and after the last one at least that one is."""
    rounds = ceil(costs.shards / costs.threads) * costs.decode_s * state.decodes
    if not state.reads_exponents:
        return rounds
    return max(costs.shard_s + rounds, costs.shards * costs.shard_s + costs.decode_s)


def small(choose: random.Random) -> tuple[list[State], Costs]:
    costs = Costs(
        read_s=choose.choice([1, 2, 3, 5, 8]),
        ratio=choose.choice([0.1, 0.3, 0.368, 0.5, 0.7, 1.0]),
        decode_s=choose.choice([0.01, 0.1, 0.3, 0.5, 1, 2, 4, 7]),
        shards=choose.choice([1, 1, 2, 2, 3]),
        threads=choose.randint(1, 3),
    )
    return [choose.choice([M, M, E, S, C]) for _ in range(choose.randint(1, 5))], costs


def scheduled(states: list[State], costs: Costs) -> float:
    return makespan(states, schedule(states, costs), costs)


def test_never_above_the_proven_multiple_of_the_optimum() -> None:
    """ZipMoE, Theorem 3.1. Scheduling in blocks also gains: one expert after another is further from the optimum."""
    choose = random.Random(1)
    found, plain = [], []
    while len(found) < INSTANCES:
        states, costs = small(choose)
        best = optimum(states, costs)
        if best is None or not best:
            continue
        made = scheduled(states, costs)
        assert made <= (3 - 1 / costs.threads) * best + 1e-9, (states, costs)
        assert lower_bound(states, costs) - 1e-9 <= best <= made + 1e-9, (states, costs)
        found.append(made / best)
        plain.append(makespan(states, [[place] for place in range(len(states))], costs) / best)
    assert sum(found) / INSTANCES < 1.006
    assert max(found) < 1.5
    assert sum(ratio < 1 + 1e-9 for ratio in found) > 0.9 * INSTANCES
    assert sum(plain) / INSTANCES > 1.01


def real(choose: random.Random, shards: int) -> tuple[list[State], Costs]:
    """Eight experts of 12.6 MB, decoded at 2.5 GB/s, over a disk of .2 to 1.3 GB/s."""
    costs = Costs(
        read_s=6.3e6 / choose.choice([1.3e9, 0.5e9, 0.2e9]),
        ratio=0.368,
        decode_s=12.6e6 / 2.5e9 / shards,
        shards=shards,
        threads=choose.randint(1, 4),
    )
    return [choose.choice(list(State)) for _ in range(8)], costs


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_on_real_sizes(shards: int) -> None:
    """Near the lower bounds; everything is in one block, once, and full experts are in none."""
    choose, ratios = random.Random(2), []
    for _ in range(200):
        states, costs = real(choose, shards)
        blocks = schedule(states, costs)
        needed = [place for place, state in enumerate(states) if state.decodes]
        assert sorted(place for block in blocks for place in block) == needed
        made, bound = makespan(states, blocks, costs), lower_bound(states, costs)
        assert bound - 1e-12 <= made <= (3 - 1 / costs.threads) * bound
        ratios.append(made / bound if bound else 1.0)
    assert sum(ratios) / len(ratios) < 1.12


def test_a_block_goes_on_until_no_thread_would_wait() -> None:
    """Expert 0 is read until 6; with expert 1 both threads are busy until 7. The next block's shards come at 7 and 8: a
    thread would wait, so expert 2 joins the block."""
    costs = Costs(read_s=4, ratio=0.5, decode_s=3.5, shards=2, threads=2)
    assert schedule([M, C, C], costs) == [[1, 2, 0]]


def test_blocks_by_hand() -> None:
    """u = 4, K = 1, v = 1, c = 6, one thread. The base is M (0), the first of Type I.

    With it alone the thread is free at 1 + 6 = 7, the disk at 1 + 4 = 5: a lag of 2, at least v: it is a block. Next is
    E (2): thread 13, disk 9: a block. No expert of Type I is left: C (1) and S (3) are the last block.
    """
    states = [M, C, E, S, F]
    assert schedule(states, Costs(read_s=4, ratio=0.25, decode_s=6)) == [[0], [2], [1, 3]]
    quick = schedule(states, Costs(read_s=4, ratio=0.25, decode_s=0.5))
    assert quick == [[1, 3, 0, 2]], "decoding never lags: one block, Type II in front"


def ticked(states: list[State], blocks: list[list[int]], costs: Costs) -> float:
    """Whole seconds, one after another."""
    reads = [
        read
        for block in blocks
        for read in [int(costs.shard_s)] * (costs.shards * sum(states[place].reads_exponents for place in block))
        + [-int(costs.read_s)] * sum(states[place].reads_mantissas for place in block)
    ]
    there = costs.shards * sum(state.decodes and not state.reads_exponents for state in states)
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
        places = [place for place, state in enumerate(states) if state.decodes]
        choose.shuffle(places)
        cut = choose.randint(0, len(places))
        blocks = [places[:cut], places[cut:]]
        assert makespan(states, blocks, costs) == ticked(states, blocks, costs)


def test_what_each_state_needs_and_takes() -> None:
    size = ExpertBytes(plane=100, exponents=37)
    assert {state.name: size.held(state) for state in State} == {"F": 200, "C": 137, "S": 100, "E": 37, "M": 0}
    assert pools_text({E: 300_000, F: 4_000_000, S: 0, C: 2_000_000}) == "C=2000000,E=300000"
    assert Counter(state.name for state in State if state.reads_exponents) == Counter("SM")
    assert Counter(state.name for state in State if state.reads_mantissas) == Counter("EM")
    assert Counter(state.name for state in State if state.decodes) == Counter("CSEM")


@pytest.mark.parametrize(
    ("states", "costs", "expected"),
    [
        ([E, E], Costs(read_s=3, ratio=0.5, decode_s=5), [[0], [1]]),
        ([S, M, C, C], Costs(read_s=3, ratio=1, decode_s=4), [[0, 2, 1], [3]]),
    ],
)
def test_the_lag_by_hand(states: list[State], costs: Costs, expected: list[list[int]]) -> None:
    """One thread, one shard per expert.

    Two E: nothing is read before the first block. Its plane is there at 3, its decoding ends at 5: 2 behind, and a
    shard takes 1.5.

    The second layer: M and S are read until 9, their shards at 3 and 6. With C, whose shard is in memory, all three of
    the block are decoded until 4, 8 and 12: 3 behind, and a shard takes 3.
    """
    assert schedule(states, costs) == expected
