"""Orders of reads and decodings: the simulator by the tick, the scheduler against the optimum and the lower bounds."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from expertcast.predictors import ExpertcastError
from expertcast.runtime.pools.schedule import Order, Read, Task, schedule, simulate
from expertcast.runtime.pools.states import Costs, ExpertBytes, State
from tests.runtime.pools.brute_force import lower_bounds, optimum

INSTANCES, MOST = 2500, 4000


def one_by_one(tasks: list[Task], costs: Costs) -> Order:
    """Each tensor's shards and plane before the next one's."""
    order = Order([], [])
    for place, task in enumerate(tasks):
        if task.state.decodes:
            order.decodes.append(place)
        order.reads.extend([Read(place, exponents=True)] * (costs.shards * task.state.reads_exponents))
        order.reads.extend([Read(place, exponents=False)] * task.state.reads_mantissas)
    return order


def small(choose: random.Random) -> tuple[list[Task], Costs]:
    tensors = choose.choice([1, 1, 1, 2])
    costs = Costs(
        read_s=choose.choice([1, 2, 3, 5, 8]),
        ratio=choose.choice([0.1, 0.3, 0.368, 0.5, 0.7, 1.0]),
        decode_s=choose.choice([0.01, 0.1, 0.3, 0.5, 1, 2, 4, 7]),
        shards=choose.choice([1, 1, 2, 2, 3]),
        threads=choose.randint(1, 3),
        tensors=tensors,
    )
    longest = choose.choice([0, 0.2, 1, 5])
    tasks = []
    for expert in range(choose.randint(1, 4 if tensors == 1 else 2)):
        state = choose.choice([State.M, State.M, State.E, State.S, State.C])
        tasks += [Task(expert=expert, state=state, compute_s=longest * choose.random())] * tensors
    return tasks, costs


def test_never_above_the_proven_multiple_of_the_optimum() -> None:
    """Row E10. What the scheduler gains is there too: the plain order is further from the optimum."""
    choose = random.Random(1)
    found, plain = [], []
    while len(found) < INSTANCES:
        tasks, costs = small(choose)
        best = optimum(tasks, costs, MOST)
        if best is None:
            continue
        made = simulate(tasks, schedule(tasks, costs), costs).makespan
        assert made <= (3 - 1 / costs.threads) * best + 1e-9, (tasks, costs)
        assert lower_bounds(tasks, costs).largest - 1e-9 <= best <= made + 1e-9, (tasks, costs)
        found.append(made / best)
        plain.append(simulate(tasks, one_by_one(tasks, costs), costs).makespan / best)
    assert sum(found) / INSTANCES < 1.006
    assert max(found) < 1.5
    assert sum(ratio < 1 + 1e-9 for ratio in found) > 0.9 * INSTANCES
    assert sum(plain) / INSTANCES > 1.014


def test_the_papers_longest_path_is_no_lower_bound() -> None:
    """One missing tensor of two shards, one thread: the first is decoded while the second is read. 1 + 2 x 10, where
    the paper's z is rho u + K c = 2 + 20."""
    costs = Costs(read_s=2, ratio=1, decode_s=10, shards=2)
    tasks = [Task(expert=0, state=State.M)]
    assert optimum(tasks, costs, MOST) == 21
    assert lower_bounds(tasks, costs).path == 21


def real(choose: random.Random, tensors: int, shards: int) -> tuple[list[Task], Costs]:
    """Eight experts of 12.6 MB, decoded at 2.5 GB/s, over a disk of .2 to 1.3 GB/s."""
    costs = Costs(
        read_s=6.3e6 / choose.choice([1.3e9, 0.5e9, 0.2e9]) / tensors,
        ratio=0.368,
        decode_s=12.6e6 / 2.5e9 / tensors / shards,
        shards=shards,
        threads=choose.randint(1, 4),
        tensors=tensors,
    )
    tasks = []
    for expert in range(8):
        state, compute_s = choose.choice(list(State)), choose.choice([0, 5e-4, 5e-3])
        tasks += [Task(expert=expert, state=state, compute_s=compute_s)] * tensors
    return tasks, costs


@pytest.mark.parametrize(("tensors", "shards"), [(1, 1), (1, 4), (3, 2)])
def test_beside_the_lower_bounds_on_real_sizes(tensors: int, shards: int) -> None:
    choose = random.Random(2)
    ratios = []
    for _ in range(200):
        tasks, costs = real(choose, tensors, shards)
        made = simulate(tasks, schedule(tasks, costs), costs).makespan
        bound = lower_bounds(tasks, costs).largest
        assert bound - 1e-12 <= made <= (3 - 1 / costs.threads) * bound
        ratios.append(made / bound)
    assert sum(ratios) / len(ratios) < 1.12


def test_a_block_goes_on_until_no_thread_would_wait() -> None:
    """Expert 0 is read until 6; with expert 1 both threads are busy until 7. The next block's shards come at 7 and 8: a
    thread would wait, so expert 2 joins the block."""
    costs = Costs(read_s=4, ratio=0.5, decode_s=3.5, shards=2, threads=2)
    tasks = [Task(expert=0, state=State.M), Task(expert=1, state=State.C), Task(expert=2, state=State.C)]
    assert schedule(tasks, costs).decodes == [1, 2, 0]


def test_everything_is_read_and_decoded_once() -> None:
    choose = random.Random(3)
    for _ in range(300):
        tasks, costs = real(choose, choose.randint(1, 3), choose.randint(1, 4))
        order = schedule(tasks, costs)
        reads = Counter((read.task, read.exponents) for read in order.reads)
        for place, task in enumerate(tasks):
            assert reads[place, True] == costs.shards * task.state.reads_exponents
            assert reads[place, False] == task.state.reads_mantissas
        assert sorted(order.decodes) == [place for place, task in enumerate(tasks) if task.state.decodes]


def test_blocks_by_hand() -> None:
    """u = 4, K = 1, v = 1, c = 6, one thread. The base is M (0), the Type I tensor that computes longest.

    With it alone the thread is free at 1 + 6 = 7, the disk at 1 + 4 = 5: a lag of 2, at least v: it is a block. Next is
    E (2): thread 13, disk 9: a block. Nothing of Type I is left: C (1) and S (3) are the last block, C computes longer.
    """
    costs = Costs(read_s=4, ratio=0.25, decode_s=6)
    tasks = [
        Task(expert=0, state=State.M, compute_s=3),
        Task(expert=1, state=State.C, compute_s=2),
        Task(expert=2, state=State.E, compute_s=1),
        Task(expert=3, state=State.S, compute_s=1),
        Task(expert=4, state=State.F, compute_s=9),
    ]
    order = schedule(tasks, costs)
    assert order.decodes == [0, 2, 1, 3]
    assert order.reads == [Read(0, True), Read(0, False), Read(2, False), Read(3, True)]
    quick = schedule(tasks, Costs(read_s=4, ratio=0.25, decode_s=0.5))
    assert quick.decodes == [1, 3, 0, 2], "decoding never lags: one block, Type II in front"
    assert quick.reads == [Read(3, True), Read(0, True), Read(0, False), Read(2, False)]


def ticked(tasks: list[Task], order: Order, costs: Costs) -> float:
    """Whole seconds, one after another."""
    left = {task.expert: 0 for task in tasks}
    for task in tasks:
        left[task.expert] += costs.shards * task.state.decodes + task.state.reads_mantissas
    reads = [(read, int(costs.shard_s if read.exponents else costs.read_s)) for read in order.reads]
    there = Counter(
        {place: costs.shards for place in order.decodes if not tasks[place].state.reads_exponents}
    )  # fmt: skip
    threads: list[tuple[int, int]] = []
    compute = {task.expert: int(task.compute_s) for task in tasks}
    now, read_end, computed = 0, reads[0][1] if reads else 0, 0
    while any(left.values()) or threads:
        for end, place in [entry for entry in threads if entry[0] == now]:
            threads.remove((end, place))
            left[tasks[place].expert] -= 1
        while reads and read_end == now:
            read = reads.pop(0)[0]
            if read.exponents:
                there[read.task] += 1
            else:
                left[tasks[read.task].expert] -= 1
            read_end += reads[0][1] if reads else 0
        for place in order.decodes:
            while there[place] and len(threads) < costs.threads:
                there[place] -= 1
                threads.append((now + int(costs.decode_s), place))
        for expert in [expert for expert, count in left.items() if not count and expert in compute]:
            computed = max(computed, now) + compute.pop(expert)
        now += 1
    return computed + sum(compute.values())


def test_the_simulator_against_one_that_ticks() -> None:
    choose = random.Random(4)
    for _ in range(400):
        costs = Costs(
            read_s=choose.choice([2, 4, 6]), ratio=choose.choice([1, 2]), decode_s=choose.randint(1, 7),
            shards=choose.choice([1, 2]), threads=choose.randint(1, 3),
        )  # fmt: skip
        tasks = []
        for expert in range(choose.randint(1, 5)):
            compute_s, state = choose.randint(0, 5), choose.choice(list(State))
            tasks += [Task(expert=expert, state=state, compute_s=compute_s)] * choose.randint(1, 2)
        order = one_by_one(tasks, costs)
        choose.shuffle(order.reads)
        choose.shuffle(order.decodes)
        assert simulate(tasks, order, costs).makespan == ticked(tasks, order, costs)


def test_what_each_state_needs_and_takes() -> None:
    size = ExpertBytes(plane=100, exponents=37)
    assert {state.name: size.held(state) for state in State} == {"F": 200, "C": 137, "S": 100, "E": 37, "M": 0}
    assert {state.name: (state.reads_exponents, state.decodes, state.reads_mantissas) for state in State} == {
        "F": (False, False, False),
        "C": (False, True, False),
        "S": (True, True, False),
        "E": (False, True, True),
        "M": (True, True, True),
    }


@pytest.mark.parametrize("wrong", [{"read_s": -1}, {"ratio": float("nan")}, {"decode_s": float("inf")}, {"shards": 0}])
def test_costs_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ExpertcastError, match=next(iter(wrong))):
        Costs(**{"read_s": 1, "ratio": 0.4, "decode_s": 1, **wrong})  # type: ignore[arg-type]
