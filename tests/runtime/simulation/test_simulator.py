"""Virtual times and counts worked out by hand, and against an LRU written down a second time."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from expertcast.predictors import ExpertcastError
from expertcast.predictors.view import ModelShape
from expertcast.runtime.policies import PRESETS, Policies
from expertcast.runtime.simulation.machine import Case, Machine, constant_times, summary
from expertcast.runtime.simulation.simulator import simulate as simulate_case
from expertcast.runtime.simulation.trace import Trace
from tests.runtime.simulation import made
from tests.runtime.simulation.made import simulate

# Two layers of three experts, K = 1: keys 0, 1, 2 and 3, 4, 5. Three slots. A layer takes 1 s before its experts are
# known and 1 s in them, a copy 3 s. The first token is the prefill, with two misses: 2 x (1 + 3 + 1) = 10 s.
#
#        needs   lru                                          seconds   belady
#   t1   1 4     miss (free slot), miss (gives up 0)          5 + 5     miss, miss (gives up 1, which never comes)
#   t2   0 3     miss (gives up 3), miss (gives up 1)         5 + 5     hit, hit
#   t3   0 4     hit, hit                                     2 + 2     hit, hit
#   t4   0 3     hit, hit                                     2 + 2     hit, hit
#   t5   2 3     miss (gives up 4), hit                       5 + 2     miss (gives up 4: neither it nor 0 comes), hit
#
# lru's miss of 3 in t2 is a collision: t2 itself gave it up one layer before.
NEEDED = [[[0], [0]], [[1], [1]], [[0], [0]], [[0], [1]], [[0], [0]], [[2], [0]]]


def test_lru_by_hand() -> None:
    done = simulate(made.trace(NEEDED, experts=3), Policies(), 3, made.machine(2))
    assert done.prefills_s == [10.0]
    assert done.steps_s == [10.0, 10.0, 4.0, 4.0, 7.0]
    row = summary(done)
    assert (row["requests"], row["hits"], row["misses"], row["collisions"], row["evicted"]) == (10, 5, 5, 1, 4)
    assert (row["hit_rate"], row["bytes"], row["bytes_per_step"]) == (0.5, 15, 3.0)
    assert (row["tpot_s"], row["tpot_mean_s"], row["ttft_s"], row["blocking_s"]) == (7.0, 7.0, 10.0, 3.0)
    assert (row["collision_rate"], row["collision_share"]) == (0.1, 0.2)
    assert row["per_layer"] == {"misses": [3, 2], "collision_rate": [0.0, 0.2], "collision_share": [0.0, 0.5]}
    assert row["redundant"] == 0.2  # the copy of the collision
    assert (row["prefill"]["misses"], row["prefill"]["bytes"]) == (2, 6)
    assert (row["prefetch_precision"], row["prefetch_recall"]) == (None, None)


def test_belady_by_hand() -> None:
    trace = made.trace(NEEDED, experts=3)
    done = simulate(trace, Policies(eviction="belady"), 3, made.machine(2))
    assert done.steps_s == [10.0, 4.0, 4.0, 4.0, 7.0]
    assert done.prefills_s == [10.0]
    assert (done.decode.total.misses, done.decode.total.collisions, done.decode.total.bytes_moved) == (3, 0, 9)
    assert done.decode.total.waited_s == 9.0


def test_a_single_slot_runs_expert_by_expert() -> None:
    """One layer, K = 1, a prompt of two experts: each is copied after the other has run, and the last one stays."""
    trace = made.trace([[[0]], [[1]], [[1]], [[0]]], experts=3, prefill=2)
    done = simulate(trace, Policies(), 1, made.machine(1))
    assert done.steps_s == [2.0, 5.0]


def test_prefetch_by_hand() -> None:
    """Room for everything, K = 1, two layers; forecasts for layer 1 of t1, t2, t3: right, wrong, wrong.

    t1: 1 s, then the miss of key 1 until 4 and behind it the forecast's key 4 until 7; layer 0 is done at 5, layer 1
        knows its routing at 6, waits until 7, is done at 8 (10 on demand).
    t2: layer 0 hits: 2 s. The forecast, key 3, is there. Layer 1 misses key 5: 1 + 3 + 1 s.
    t3: layer 0 misses key 2: 5 s. The forecast, key 5, is there. Layer 1 hits: 2 s.
    """
    trace = made.trace(
        [[[0], [0]], [[1], [1]], [[1], [2]], [[2], [1]]], experts=3, hints={1: [[0], [1], [0], [2]]}
    )  # fmt: skip
    done = simulate(trace, Policies(), 6, made.machine(2), predictor="made")
    assert done.steps_s == [8.0, 7.0, 7.0]
    total = done.decode.total
    assert (total.hits, total.misses) == (3, 3)
    assert (total.prefetched, total.prefetched_used, total.prefetched_in_time) == (1, 1, 0)
    row = summary(done)
    assert (row["prefetch_precision"], row["prefetch_recall"], row["redundant"]) == (1.0, 0.25, 0.0)
    assert simulate(trace, Policies(), 6, made.machine(2)).steps_s == [10.0, 7.0, 7.0]
    assert simulate(trace, Policies(prefetch="none"), 6, made.machine(2), predictor="made").steps_s == [10.0, 7.0, 7.0]


def test_zero_infinity_brings_whole_layers() -> None:
    """K = 1, two layers of 4 experts, room and time for all: layer 1 has one expert from the prefill, the other three
    come while layer 0 of t1 runs, and nothing needs them."""
    trace = made.trace([[[0], [0]]] * 3, experts=4, hints={1: [[0]] * 3})
    machine = made.machine(2, layer_s=100.0)
    total = simulate(trace, PRESETS["zero_infinity"].policies, 8, machine, predictor="made").decode.total
    assert (total.prefetched, total.prefetched_used) == (3, 0)


def test_wrong_forecasts_hold_up_the_link() -> None:
    """A forecast is under way when the miss comes: t1 hits layer 0 at 1 s, prefetches key 5 until 4; layer 1 is routed
    at 3 s and its miss of key 4 goes behind it, 4 to 7; done at 8 s. The copy of 5 was not needed."""
    trace = made.trace([[[0], [0]], [[0], [1]]], experts=3, hints={1: [[0], [2]]})
    done = simulate(trace, Policies(), 6, made.machine(2), predictor="made")
    assert done.steps_s == [8.0]
    row = summary(done)
    assert (row["prefetched"], row["prefetch_precision"], row["redundant"]) == (1, 0.0, 0.5)


def test_dropped_forecasts_count_for_precision() -> None:
    """K = 3, two layers of 2 s, a copy 3 s. The prefill brings experts 2, 3 and 4 of layer 1. A second later t1
    forecasts 0, 1 and 2 for it: 2 is there, 0 is copied, 1 queued. Layer 1 is routed at 3 s and needs 0, 3 and 4: the
    copy of 1 is dropped. One of two requested copies is used, and one of one executed copy."""
    trace = made.trace([[[0, 1, 2], [2, 3, 4]], [[0, 1, 2], [0, 3, 4]]], experts=5, hints={1: [[0, 1, 2]] * 2})
    done = simulate(trace, Policies(), 10, made.machine(2), predictor="made")
    total = done.decode.total
    assert (total.prefetched, total.dropped, total.prefetched_used) == (1, 1, 1)
    row = summary(done)
    assert (row["prefetch_precision"], row["issued_precision"], row["dropped"]) == (0.5, 1.0, 1)
    assert done.decode.as_dict()["prefetch_precision"] == 0.5


def test_a_layers_experts_are_one_event() -> None:
    """K = 2, two slots, one layer: 0 1 | 1 2. The requests of t1 are one event: 2 evicts 0, and 1 is a hit."""
    done = simulate(made.trace([[[0, 1]], [[1, 2]]], experts=3), Policies(), 2, made.machine(1))
    assert (done.decode.total.hits, done.decode.total.misses) == (1, 1)
    assert done.steps_s == [1.0 + 3.0 + 1.0]


def test_a_batch_takes_its_union() -> None:
    """Two texts, K = 1, one layer of four experts: the prefill needs 0 and 1, the step 2 and 0. Experts take 1 s each
    (K = 1), copies 3 s: 1 + 2 x 3 + 2 and 1 + 3 + 2 s."""
    trace = made.trace([[[0]], [[2]], [[1]], [[0]]], experts=4, documents=[2, 2], batch=2)
    done = simulate(trace, Policies(), 4, made.machine(1))
    assert (done.prefills_s, done.steps_s) == ([9.0], [6.0])
    assert done.decode.total.requests == 2


def test_more_experts_than_slots_go_in_chunks() -> None:
    """Four experts over two slots load and compute one by one, copies going on beside: 1, then copies until 4, 7, 10,
    13; the last is computed at 14. Each chunk is computed while the next one loads."""
    trace = made.trace([[[0]], [[1]], [[2]], [[3]], [[0]], [[1]], [[2]], [[3]]], experts=4, prefill=4)
    done = simulate(trace, Policies(), 2, made.machine(1))
    assert done.prefills_s == [14.0]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("slots", [2, 5, 9, 18])
def test_against_a_second_lru(seed: int, slots: int) -> None:
    trace = made.random_trace(seed)
    done = simulate(trace, Policies(eviction="lru", prefetch="none"), slots, made.machine(3))
    counts, steps_s = _lru(trace, slots, copy_s=3.0, layer_s=2.0)
    total = done.decode.total
    assert (total.hits, total.misses, total.collisions) == counts
    assert done.steps_s == pytest.approx(steps_s)


def _lru(trace: Trace, slots: int, *, copy_s: float, layer_s: float) -> tuple[tuple[int, int, int], list[float]]:
    """Return hits, misses and collisions of all decode steps, and the seconds of each step, from a list by use."""
    order: list[int] = []
    hits = misses = collisions = 0
    steps_s: list[float] = []
    for forward in trace.forwards:
        given_up: set[int] = set()
        seconds = 0.0
        for keys in forward.keys:
            missing = [key for key in keys if key not in order]
            parts = [keys] if len(keys) <= slots else _parts(keys, order, slots)
            for part in parts:
                for key in [key for key in part if key not in order]:
                    if len(order) == slots:
                        victim = next(other for other in order if other not in part)
                        order.remove(victim)
                        given_up.add(victim)
                    order.append(key)
                for key in part:
                    order.remove(key)
                    order.append(key)
            if not forward.fresh:
                hits += len(keys) - len(missing)
                misses += len(missing)
                collisions += len(given_up.intersection(missing))
            seconds += layer_s + copy_s * len(missing)
        if not forward.fresh:
            steps_s.append(seconds)
    return (hits, misses, collisions), steps_s


def _parts(keys: Sequence[int], order: Sequence[int], slots: int) -> list[list[int]]:
    """Return the chunks of a prefill: half the slots each, missing experts first."""
    ordered = sorted(keys, key=lambda key: (key in order, key))
    size = max(1, slots // 2)
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


@pytest.mark.parametrize("slots", [0, 1])
def test_refuses_fewer_slots_than_a_token_needs(slots: int) -> None:
    with pytest.raises(ExpertcastError, match=f"slots={slots} is fewer than the 2 experts one token needs"):
        simulate(made.random_trace(0), Policies(), slots, made.machine(3))


def test_refuses_other_numbers() -> None:
    trace = made.random_trace(0)
    still = Machine(times=constant_times(3, 1.0), block_bytes={"full": 1}, bandwidth=0.0)
    with pytest.raises(ExpertcastError, match="bandwidth=0"):
        simulate(trace, Policies(), 4, still)
    for times in ([1.0, 2.0], [0.0], [1.0, 1.0, -1.0]):
        with pytest.raises(ExpertcastError, match="one for each of 3 layers"):
            constant_times(3, times)


# Recall in time, by the link: what the metric counts in closed form is what the simulator counts


TOKENS, LAYERS, EXPERTS, TOP_K = 40, 5, 12, 4
SHAPE = ModelShape(layers=LAYERS, experts=EXPERTS, top_k=TOP_K, hidden=4)
Ids = list[list[int]]


def routing(seed: int) -> tuple[list[Ids], dict[int, Ids]]:
    """Return random experts [T][L][K], and forecasts that are right three times out of four."""
    choose = random.Random(seed)
    needed = [[choose.sample(range(EXPERTS), TOP_K) for _ in range(LAYERS)] for _ in range(TOKENS)]
    hints: dict[int, Ids] = {layer: [] for layer in range(1, LAYERS)}
    for token in needed:
        for layer in range(1, LAYERS):
            others = [expert for expert in range(EXPERTS) if expert not in token[layer]]
            hint = [e if choose.random() < 0.75 else others.pop() for e in choose.sample(token[layer], TOP_K)]
            hints[layer].append(hint)
    return needed, hints


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.3, 2.0, 3.0, 5.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_it_counts_what_the_simulator_counts(ratio: float, seed: int) -> None:
    """Without a cache, with all forecast experts requested in order: the link's `prefetched_in_time` agrees."""
    needed, hints = routing(seed)
    trace = made.trace(needed, experts=EXPERTS, hints=hints)
    layer_s, copy_s = 1.0, ratio / TOP_K
    machine = Machine(times=constant_times(LAYERS, layer_s), block_bytes={"full": 1}, bandwidth=1 / copy_s)
    case = Case(policies=Policies(), slots=LAYERS * EXPERTS, machine=machine, predictor="made", cache=False)
    counted = simulate_case(trace, case).decode.total
    assert counted.requests == LAYERS * (TOKENS - 1) * TOP_K
    complete = int(layer_s / copy_s + 1e-9)  # of the copies that start in a layer's time
    assert counted.prefetched_in_time == sum(
        expert in needed[token][layer] for layer, rows in hints.items() for token in range(1, TOKENS)
        for expert in rows[token][:complete]
    )  # fmt: skip
    assert counted.prefetched_used >= counted.prefetched_in_time
