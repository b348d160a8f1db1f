"""LFRU: uses over age, against a sort of all residents, and by hand."""

from __future__ import annotations

import random

from expertcast.runtime.policies import EVICTION, CacheShape


def test_by_hand() -> None:
    policy = EVICTION.choose("lfru").make(CacheShape(layers=1, experts=4, top_k=1, slots=3))
    for key in (0, 0, 0, 1, 2):
        policy.start_layer(0, [key])
        if key not in held_by(policy):
            policy.insert(key)
        policy.use([key])
    assert policy.victim(()) == 1, "3 uses 3 events old, 1 use 2 old, 1 use 1 old: 3/3, 1/2, 1/1"
    assert policy.victim({1}) == 2, "of 3/3 and 1/1 the one used less"
    policy.start_layer(0, [3])
    assert policy.victim({1}) == 2, "3/4 and 1/2"
    policy.remove(0)
    policy.insert(0)
    assert policy.victim({1, 2}) == 0
    policy.start_layer(0, [3])
    assert policy.victim({1}) == 2, "its three uses are remembered"


def held_by(policy: object) -> set[int]:
    return {key for ages in policy._by_uses.values() for key in ages}  # type: ignore[attr-defined]


def test_against_its_slowest_form() -> None:
    choose = random.Random(5)
    victims = 0
    for _ in range(60):
        experts, slots = choose.randint(3, 9), choose.randint(2, 6)
        policy = EVICTION.choose("lfru").make(CacheShape(layers=2, experts=experts, top_k=1, slots=slots))
        uses: dict[int, int] = {}
        last: dict[int, int] = {}
        for now in range(1, 60):
            key = int(2 * experts * choose.random() ** 2)
            policy.start_layer(key // experts, [key])
            if key not in last:
                if len(last) == slots:
                    expected = min(last, key=lambda k: (uses[k] / (now - last[k] + 1), uses[k]))
                    assert policy.victim({key}) == expected
                    policy.remove(expected)
                    del last[expected]
                    victims += 1
                policy.insert(key)
            policy.use([key])
            uses[key] = uses.get(key, 0) + 1
            last[key] = now
    assert victims > 500
