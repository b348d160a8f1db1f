"""Marking: phases, and draws that are fair."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from expertcast.predictors import ExpertcastError
from expertcast.runtime.policies import EVICTION, CacheShape, EvictionPolicy

SHAPE = CacheShape(layers=1, experts=12, top_k=1, slots=6)


def filled(seed: int) -> EvictionPolicy:
    policy = EVICTION.choose(f"marking:seed={seed}").make(SHAPE)
    for key in range(6):
        policy.insert(key)
    return policy


def test_phases_against_sets() -> None:
    """What was used since the phase began stays while there is anything else; when nothing else is left, a new phase
    begins with all that was held."""
    choose = random.Random(0)
    policy, held, marked, phases = filled(3), set(range(6)), set[int](), 0
    for _ in range(2000):
        key = choose.randrange(12)
        if key not in held:
            victim = policy.victim(())
            assert victim in held
            if marked == held:
                marked, phases = set(), phases + 1
            assert victim not in marked
            policy.remove(victim)
            held.remove(victim)
            policy.insert(key)
            held.add(key)
        policy.use([key])
        marked.add(key)
    assert phases > 100


def test_every_expert_is_as_likely() -> None:
    """Of four that are not marked, over 2,000 seeds: within four standard deviations of 500."""
    drawn: Counter[int | None] = Counter()
    for seed in range(2000):
        policy = filled(seed)
        policy.use([1, 4])
        drawn[policy.victim(())] += 1
    assert set(drawn) == {0, 2, 3, 5}
    assert all(abs(count - 500) < 4 * (2000 * 0.25 * 0.75) ** 0.5 for count in drawn.values())


def test_a_seed_that_cannot_be() -> None:
    with pytest.raises(ExpertcastError, match="seed=-1"):
        EVICTION.choose("marking:seed=-1")
