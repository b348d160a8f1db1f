"""The bounds against every choice there is, and against every other policy."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from itertools import combinations

import pytest

from expertcast.predictors import ExpertcastError
from expertcast.runtime.policies import EVICTION, CacheShape
from expertcast.runtime.policies.belady import Belady, bypass_misses
from tests.runtime.policies.replay import Visit, cache, run

ONLINE = [name for name in EVICTION.names() if not EVICTION.choose(name).cls.offline]
POLICIES = [*ONLINE, "fld:distance=absolute", "least_stale:order=layer", "importance:alpha=0", "importance:alpha=1"]


def _fewest(events: Sequence[Sequence[int]], slots: int, *, forced: bool) -> int:
    """Fewest misses over all sets of experts that could be held after each event."""
    cost: dict[frozenset[int], int] = {frozenset(): 0}
    for keys in events:
        after: dict[frozenset[int], int] = {}
        for held, so_far in cost.items():
            misses = so_far + len(set(keys) - held)
            for kept in _kept(held, frozenset(keys), slots, forced):
                after[kept] = min(misses, after.get(kept, misses))
        cost = after
    return min(cost.values())


def _kept(held: frozenset[int], keys: frozenset[int], slots: int, forced: bool) -> list[frozenset[int]]:
    """All that may be held after an event: not more than was there or came, and with `forced` all that it needs."""
    must = keys if forced else frozenset()
    others = sorted((held | keys) - must)
    room = slots - len(must)
    return [
        must | frozenset(some) for count in range(min(room, len(others)) + 1) for some in combinations(others, count)
    ]


def _tiny(choose: random.Random) -> tuple[list[list[Visit]], int, int, int]:
    """Forwards, layers, experts and slots that brute force can deal with."""
    layers = choose.randint(1, 3)
    experts = choose.randint(2, 6 // layers + 1)
    size = choose.randint(1, min(2, experts))
    slots = choose.randint(size, min(4, layers * experts))
    forwards = [
        [Visit(needs=[layer * experts + e for e in choose.sample(range(experts), choose.randint(1, size))])
         for layer in range(layers)]
        for _ in range(choose.randint(1, 9 // layers))
    ]  # fmt: skip
    return forwards, layers, experts, slots


def test_both_bounds_are_the_fewest_misses_possible() -> None:
    choose = random.Random(0)
    below = 0
    for _ in range(400):
        forwards, layers, experts, slots = _tiny(choose)
        events = [visit.needs for forward in forwards for visit in forward]
        forced = run(cache("belady", layers=layers, experts=experts, slots=slots), forwards).misses
        assert forced == _fewest(events, slots, forced=True), (events, slots)
        assert sum(bypass_misses(events, slots)) == _fewest(events, slots, forced=False), (events, slots)
        below += sum(bypass_misses(events, slots)) < forced
    assert below > 40, "the two bounds are not the same"


def _random(choose: random.Random) -> tuple[list[list[Visit]], dict[str, int | str]]:
    """Forwards of skewed routing with what policies read, and a cache for them, global or per layer."""
    layers, experts = choose.randint(1, 5), choose.randint(3, 9)
    top_k = choose.randint(1, min(3, experts))
    scope = choose.choice(["global", "layer"])
    least = top_k * (layers if scope == "layer" else 1)
    slots = choose.randint(least, max(least, layers * experts - 1))
    skew = choose.choice([0.0, 0.7, 1.5])
    forwards = []
    for _ in range(choose.randint(3, 7)):
        forward = []
        for layer in range(layers):
            weights = [choose.random() / (1 + expert) ** skew for expert in range(experts)]
            chosen = sorted(range(experts), key=lambda expert: -weights[expert])[:top_k]
            share = [weight / sum(weights) for weight in weights]
            needs = [layer * experts + expert for expert in chosen]
            forward.append(Visit(needs=needs, scores=share, forecast=share if layer + 1 < layers else ()))
        forwards.append(forward)
    return forwards, {"layers": layers, "experts": experts, "slots": slots, "top_k": top_k, "scope": scope}


def test_no_policy_has_fewer_misses() -> None:
    choose = random.Random(1)
    better = dict.fromkeys(POLICIES, 0)
    for _ in range(1000):
        forwards, shape = _random(choose)
        bound = run(cache("belady", **shape), forwards).misses  # type: ignore[arg-type]
        for policy in POLICIES:
            misses = run(cache(policy, **shape), forwards).misses  # type: ignore[arg-type]
            assert bound <= misses, (policy, shape)
            better[policy] += bound < misses
        events = [visit.needs for forward in forwards for visit in forward]
        if shape["scope"] == "global":
            assert sum(bypass_misses(events, int(shape["slots"]))) <= bound
    assert all(count > 200 for count in better.values()), better


def _belady() -> Belady:
    policy = EVICTION.choose("belady").make(CacheShape(layers=2, experts=4, top_k=1, slots=2))
    assert isinstance(policy, Belady)
    return policy


def test_without_a_future() -> None:
    message = "belady needs the future: give the events of a recorded trace to foresee()"
    with pytest.raises(ExpertcastError, match=re.escape(message)):
        _belady().start_layer(0, [1])
    policy = _belady()
    policy.insert(1)
    with pytest.raises(ExpertcastError, match=re.escape(message)):
        policy.victim(())


def test_with_another_future() -> None:
    policy = _belady()
    policy.foresee([[1, 2], [5]])
    policy.start_layer(0, [2, 1])
    with pytest.raises(ExpertcastError, match=re.escape("foresaw keys [5] at event 1, layer 1 needs [4, 6]")):
        policy.start_layer(1, [6, 4])
    policy.start_layer(1, [5])
    with pytest.raises(ExpertcastError, match="foresaw 2 events, and layer 0 runs after them"):
        policy.start_layer(0, [1])


def test_a_new_future_counts_for_what_is_held() -> None:
    policy = _belady()
    policy.foresee([[1], [5], [2]])
    for key in (1, 2):
        policy.insert(key)
    assert policy.victim(()) == 2
    policy.foresee([[2], [5], [1]])
    assert policy.victim(()) == 1
    assert policy.victim({1}) == 2
