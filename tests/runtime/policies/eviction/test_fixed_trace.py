"""Every policy on one small trace, worked out by hand: what is missing, what is given up, and the counts.

Three layers a, b, c of three experts, four slots, two experts per layer and forward; a0 is key 0, c2 key 8.

    forward 1: a0 a1, b0 b1, c0 c2      forward 3: a1 a2, b0 b2, c0 c1
    forward 2: a0 a1, b0 b2, c0 c2      forward 4: a0 a2, b0 b2, c1 c2

24 requests. One forward needs six experts, two more than there is room for. In the tables a row is a forward,
`x y > v w` means that x and y are missing and v and w are given up for them, `*` marks each collision: a missing expert
that was given up before in the same forward. Until layer c of the first forward the slots are just filled.
"""

from __future__ import annotations

import pytest

from expertcast.runtime.policies.belady import bypass_misses
from expertcast.runtime.policies.settings import EVICTION
from tests.runtime.policies.eviction.replay import BLOCK, LOW, Visit, cache, run, step, tell

NEEDS = ["a0 a1, b0 b1, c0 c2", "a0 a1, b0 b2, c0 c2", "a1 a2, b0 b2, c0 c1", "a0 a2, b0 b2, c1 c2"]
SCORES = {"a": (0.5, 0.3125, 0.1875), "b": (0.625, 0.3125, 0.0625), "c": (0.25, 0.25, 0.5)}
LOW_NAMES = ("a0", "b1", "c2")
"""Held in int4 in the trial of lhu."""

LRU = """
    Each forward needs six other experts between two uses of the same one: nothing survives.
    a0 a1       | b0 b1         | c0 c2 > a0 a1
    a0 a1 > b0 b1 | b0* b2 > c0 c2  | c0* c2* > a0 a1
    a1 a2 > b0 b2 | b0* b2* > c0 c2 | c0* c1 > a1 a2
    a0 a2 > b0 b2 | b0* b2* > c0 c1 | c1* c2 > a0 a2
"""
MARKING = """
    Drawn with seed 0, where there is a choice: when all are marked, a phase ends, and two of the four go. That is at c
    in 1, at b in 2, at a and c in 3 and at b in 4. Otherwise the unmarked ones go: what is left of the phase before, of
    which b0 goes at a in 2, a0 at c in 2, a1 and b2 at a in 4, a0 at c in 4.
    a0 a1       | b0 b1         | c0 c2 > a1 b1
    a1 > b0     | b0* b2 > a1 c2 | c2* > a0
    a1 a2 > c0 c2 |               | c0* c1 > a2 b0
    a0 a2 > a1 b2 | b0 b2* > a2 c0 | c2 > a0
"""
LFU = """
    2: b0 is the oldest of those used once. At c: b2 once, then of a0 a1 b0, used twice, a0 is the oldest.
    3: a1 hits; b0 is the oldest of those used twice. At b: a2 once, then c0 before c2. At c: c2, used twice in forward
       2, before b2, used the second time in this one.
    4: c1 once; of a1 b0 c0, used three times, a1. b0 hits; a2 twice. At c: of a0 b2 c0, three times, c0 and a0.
    a0 a1       | b0 b1         | c0 c2 > a0 a1
    a0 a1 > b0 b1 | b0* b2 > c0 c2 | c0* c2* > b2 a0
    a2 > b0     | b0* b2 > a2 c0 | c0* c1 > c2 b2
    a0 a2 > c1 a1 | b2 > a2       | c1* c2 > c0 a0
"""
LHU = """
    a0, b1 and c2 are in int4: they are worth nothing, however often they are used. c2 is the first to go from forward 2
    on, unless an equal that was used longer ago is there: a0 at b in forward 2, then b2, loaded but not used so far.
    3: a2 once, b2 twice against a1 and b0 three times. 4: c1 once, a1 three times and the oldest; a0 never.
    At c in 4: a2 twice; c0 three times, used before b2, also three times.
    a0 a1       | b0 b1         | c0 c2 > a0 b1
    a0 > c2     | b2 > a0       | c2* > b2
    a2 > c2     | b2 > a2       | c1 > b2
    a0 a2 > c1 a1 | b2 > a0       | c1* c2 > a2 c0
"""
FLD = """
    Farthest is the running layer itself, then the one before it: at a the order is a c b, at b it is b a c, at c it is
    c b a. So b goes at c, a at b and c at a, but for a1 and c0 in forward 4, which their own layer does not need.
    a0 a1       | b0 b1         | c0 c2 > b0 b1
                | b0 b2 > a0 a1 |
    a1 a2 > c0 c2 |               | c0* c1 > b0 b2
    a0 > a1     | b0 b2 > a0 a2 | c2 > c0
"""
ABSOLUTE = """
    At a: c b. At b: a and c are equally far. At c: a b. So c goes at a, just before a's at c: both come back too soon.
    2: at b of a0 a1, a0; at c a1 and then, of b0 b1 b2, b1, not used in this forward.
    a0 a1       | b0 b1         | c0 c2 > a0 a1
    a0 a1 > c0 c2 | b2 > a0       | c0* c2* > a1 b1
    a1 a2 > c0 c2 |               | c0* c1 > a1 a2
    a0 a2 > c0 c1 |               | c1* c2 > a0 a2
"""
SCORE = """
    Means as shares of the highest: a 1 5/8 3/8, b 1 1/2 1/10, c 1/2 1/2 1. Equals: the first layer.
    1: at c b1 1/2, a1 5/8. 2: at a c0 1/2; at b a1 5/8; at c b2 1/10. 3: at a c0, then a0 of a0 b0 c2, all 1;
    at b a2 3/8; at c b2, a1. 4: at a c0 and c1, 1/2 both, c0 loaded first; at b a2; at c b2.
    a0 a1       | b0 b1         | c0 c2 > b1 a1
    a1 > c0     | b2 > a1       | c0* > b2
    a1 a2 > c0 a0 | b2 > a2       | c0* c1 > b2 a1
    a0 a2 > c0 c1 | b2 > a2       | c1* > b2
"""
LEAST_STALE = """
    Stale ones first: 1: none is stale at c, b is farther than a. 2: a0 a1 hit and are current; at b c0 c2 are the stale
    ones; at c all are current, b is farthest. 3: a0 is stale, as are c0 c2, a is farthest: a0. Then as before. 4: a1 is
    stale, as are c0 c1: a1. Without prefetches this keeps the wrong half.
    a0 a1       | b0 b1         | c0 c2 > b0 b1
                | b0 b2 > c0 c2 | c0* c2* > b0 b2
    a2 > a0     | b0 b2 > c0 c2 | c0* c1 > b0 b2
    a0 > a1     | b0 b2 > c0 c1 | c1* c2 > b0 b2
"""
IMPORTANCE = """
    gamma = 1/2, alpha = 1/2, so that with n residents s = u / 2U + 1 / 2n without forecasts.
    A use is worth 1, 2, 4, 8 in the four forwards.
    1, 2: of n = 2 in a layer both have 1/2; equals: the first layer. At b in 2: a before c.
    3: at a: b0 3, b2 2: 0.55 and 0.45; c0 c2 1/2: b2, then c0. At b: a1 7, a2 4: 0.57 and 0.43; c2 1/2, as ranked with
       c0: a2. At c: b0 7, b2 6: 0.52 and 0.48; a1 0.57, c2 still 1/2: b2 c2.
    4: at a: c0 7, c1 4: 0.57 and 0.43; a1 0.57, b0 0.52: c1 b0. At b: a0 11, a1 7, a2 12 of three: 0.35, 0.28, 0.37;
       c0 0.57: a1 a0. At c: a2 0.37; b0 15, b2 14: 0.51 and 0.49; c0 0.57: a2 b2.
    a0 a1       | b0 b1         | c0 c2 > a0 a1
    a0 a1 > b0 b1 | b0* b2 > a0 a1 |
    a1 a2 > b2 c0 | b2* > a2      | c0* c1 > b2 c2
    a0 a2 > c1 b0 | b0* b2 > a1 a0 | c1* c2 > a2 b2
"""
BELADY = """
    1: at c b1 is never used again, a0 a1 and b0 are next at a and b: b1 b0. 2: at b a1 comes back at a, a0 later, c0 c2
    before both: a0 a1. 3: at a c2 comes last, then c0 after b0 b2: c2 c0. At c a1 never, then of a2 b0 b2 the later
    ones, b0 used before b2. 4: at a c0 never; at b a0 never; at c a2 never.
    a0 a1       | b0 b1         | c0 c2 > b1 b0
                | b0 b2 > a0 a1 |
    a1 a2 > c2 c0 |               | c0* c1 > a1 b0
    a0 > c0     | b0 > a0       | c2 > a2
"""
TRIALS = {
    "lru": (LRU, 0, 24, 9, 24 * BLOCK),
    "fifo": (LRU, 0, 24, 9, 24 * BLOCK),
    "marking": (MARKING, 5, 19, 4, 19 * BLOCK),
    "lfu": (LFU, 2, 22, 6, 22 * BLOCK),
    "lhu": (LHU, 7, 17, 2, 10 * BLOCK + 7 * LOW),
    "fld": (FLD, 8, 16, 1, 16 * BLOCK),
    "fld:distance=absolute": (ABSOLUTE, 5, 19, 4, 19 * BLOCK),
    "score": (SCORE, 6, 18, 3, 18 * BLOCK),
    "least_stale": (LEAST_STALE, 4, 20, 4, 20 * BLOCK),
    "least_stale:order=layer": (LRU, 0, 24, 9, 24 * BLOCK),
    "importance:gamma=0.5": (IMPORTANCE, 3, 21, 5, 21 * BLOCK),
    "belady": (BELADY, 9, 15, 1, 15 * BLOCK),
}
"""Table, hits, misses, collisions, bytes."""


def _key(name: str) -> int:
    return "abc".index(name[0]) * 3 + int(name[1])


def _name(key: int) -> str:
    return "abc"[key // 3] + str(key % 3)


def _visit(layer: int, names: str) -> Visit:
    return Visit(needs=[_key(name) for name in names.split()], scores=SCORES["abc"[layer]])


FORWARDS = [[_visit(layer, names) for layer, names in enumerate(row.split(", "))] for row in NEEDS]


@pytest.mark.parametrize("policy", list(TRIALS))
def test_policies(policy: str) -> None:
    table, hits, misses, collisions, moved = TRIALS[policy]
    residency = cache(policy, layers=3, experts=3, slots=4)
    low = [_key(name) for name in LOW_NAMES] if policy == "lhu" else []
    tell(residency, FORWARDS)
    rows = [line.split("|") for line in table.splitlines() if line.count("|") == 2]
    assert len(rows) == 4
    for forward, row in zip(FORWARDS, rows, strict=True):
        residency.start_pass(fresh=False)
        for layer, (visit, cell) in enumerate(zip(forward, row, strict=True)):
            missing, _, victims = cell.partition(">")
            before = set(residency.pool.slots)
            assert {_name(key) for key in set(visit.needs) - before} == set(missing.replace("*", "").split())
            collided = residency.stats.total.collisions
            step(residency, layer, visit, low)
            assert {_name(key) for key in before - set(residency.pool.slots)} == set(victims.split())
            assert residency.stats.total.collisions - collided == missing.count("*")
    total = residency.stats.total
    assert (total.requests, total.hits, total.misses) == (24, hits, misses)
    assert (total.collisions, total.bytes_moved) == (collisions, moved)
    assert total.evicted == misses - 4


def test_every_policy_is_in_the_trial() -> None:
    """The forecast policy has a trial of its own: it reads more than keys. So have lfru and next_use."""
    assert {name.partition(":")[0] for name in TRIALS} == set(EVICTION.names()) - {"forecast", "lfru", "next_use"}


def test_lhu_is_lfu_where_all_is_in_full() -> None:
    assert run(cache("lhu", layers=3, experts=3, slots=4), FORWARDS) == run(
        cache("lfu", layers=3, experts=3, slots=4), FORWARDS
    )


def test_bypass() -> None:
    """Kept is what is needed soonest, whether it was held or missed.

    1: all six are missing; kept are a0 a1 b0 and one of c0 c2, say c0. 2: at b b2 is missing, a0 is needed last; at c
    c2 is missing and needed last itself. 3: at a a2 is missing, a1 not needed again; b0 b2 are held; at c c1 is
    missing, c0 not needed again. 4: a0, then c2 are missing.
    """
    events = [visit.needs for forward in FORWARDS for visit in forward]
    assert bypass_misses(events, 4) == [2, 2, 2, 0, 1, 1, 1, 0, 1, 1, 0, 1]
    assert bypass_misses(events, 9) == [2, 2, 2, 0, 1, 0, 1, 0, 1, 0, 0, 0], "each expert once"
    assert bypass_misses(events, 0) == [2] * 12


def test_a_forecast_marks_as_current() -> None:
    """Least-Stale with prefetches, trap 3. Forward 1 uses a0, b1 before b0, and c0: four slots.

    Forward 2: a0 hits; b1 is wanted, and current now. At b, b2 is missing: b0 and c0 are stale, b is farther than c, so
    b0 goes, not b1, which was used before it. Then c1 is prefetched: c0, the last stale one, goes. At c, c0 is missing:
    all are current, c is farthest but c1 is needed, then comes b: b1, wanted at a, before b2, used at b.
    """
    first = [Visit(needs=[0]), Visit(needs=[4, 3]), Visit(needs=[6])]
    second = [Visit(needs=[0], wants=[4]), Visit(needs=[5], wants=[7]), Visit(needs=[6, 7])]
    residency = cache("least_stale", layers=3, experts=3, slots=4)
    run(residency, [first])
    held = []
    residency.start_pass(fresh=False)
    for layer, visit in enumerate(second):
        step(residency, layer, visit)
        held.append(" ".join(sorted(map(_name, residency.pool.slots))))
    assert held == ["a0 b0 b1 c0", "a0 b1 b2 c1", "a0 b2 c0 c1"]
    total = residency.stats.total
    assert (total.hits, total.misses, total.collisions, total.prefetched) == (2, 6, 1, 1)


def test_importance_follows_the_forecast() -> None:
    """alpha = 1/2, gamma = 1: one forward uses a0 a1, b0 b1; then come forecasts for b.

    a0 a1: 1/4 + 1/4 each; b0 b1 have equal shares of what the forecast leaves to residents: 1/2 as well, so that the
    first layer goes first. With 0 for b0 and 1/4 for b1 they have 1/4 and 3/4. The forecast stands when b
    has run with b0, used twice then: 1/3 and 2/3.
    """
    residency = cache("importance:gamma=1", layers=2, experts=3, slots=4)
    run(residency, [[Visit(needs=[0, 1]), Visit(needs=[3, 4])]])
    policy = residency.eviction.policies[0]
    assert policy.victim(()) == 0
    assert policy.victim({0, 1}) == 3
    policy.see_forecast(1, [0.125, 0.125, 0.75])
    assert policy.victim(()) == 0, "equal shares"
    policy.see_forecast(1, [0.0, 0.25, 0.75])
    assert policy.victim(()) == 3
    assert policy.victim({3}) == 0
    assert policy.victim({0, 1, 3}) == 4
    policy.see_forecast(1, [0.0, 0.0, 1.0])
    assert policy.victim(()) == 0, "nothing to share among residents: equal shares again"
    policy.see_forecast(1, [0.0, 0.25, 0.75])
    policy.start_layer(1, [3])
    policy.use([3])
    assert policy.victim(()) == 3, "1/2 of 2/3 and of 0 against 1/2"
    policy.see_forecast(1, [0.5, 0.25, 0.25])
    assert policy.victim(()) == 4, "1/2 of 1/3 and of 1/3 against 1/2"
