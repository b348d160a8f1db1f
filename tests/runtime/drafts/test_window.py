"""Eviction over the window: as few misses as any order can have, against all orders, and by hand."""

from __future__ import annotations

import itertools
import random
from functools import cache

import pytest

from expertcast.runtime.drafts.lookahead import LookaheadBuffer
from expertcast.runtime.drafts.window import WindowEviction, over_window
from expertcast.runtime.policies import EVICTION, CacheShape, Eviction

LAYERS, EXPERTS, TOP_K = 4, 5, 2


def _shape(slots: int) -> CacheShape:
    return CacheShape(layers=LAYERS, experts=EXPERTS, top_k=TOP_K, slots=slots)


def _verified(policy: WindowEviction, held: set[int], needed: list[list[int]], slots: int) -> int:
    """Misses of a verification that loads on demand."""
    misses = 0
    for layer, keys in enumerate(needed):
        policy.start_layer(layer, keys)
        for key in keys:
            if key in held:
                continue
            misses += 1
            if len(held) == slots:
                victim = policy.victim(keys)
                assert victim is not None
                policy.remove(victim)
                held.remove(victim)
            policy.insert(key)
            held.add(key)
        policy.use(keys)
        policy.passed = layer
    return misses


def _fewest(held: frozenset[int], needed: tuple[tuple[int, ...], ...], slots: int) -> int:
    """Over all choices of what is given up, layer by layer."""

    @cache
    def from_layer(held: frozenset[int], layer: int) -> int:
        if layer == len(needed):
            return 0
        keys = frozenset(needed[layer])
        missing = keys - held
        surplus = max(0, len(held) + len(missing) - slots)
        outcomes = itertools.combinations(sorted(held - keys), surplus)
        return len(missing) + min(from_layer(held - set(gone) | keys, layer + 1) for gone in outcomes)

    return from_layer(held, 0)


@pytest.mark.parametrize("seed", range(40))
def test_no_order_of_evictions_misses_less(seed: int) -> None:
    choose = random.Random(seed)
    slots = choose.randint(4, 10)
    policy = WindowEviction(EVICTION.choose("lru").make(_shape(slots)), LookaheadBuffer(LAYERS, EXPERTS))
    held = set(choose.sample(range(LAYERS * EXPERTS), slots))
    for key in choose.sample(sorted(held), slots):
        policy.insert(key)
    needed: list[list[int]] = []
    for layer in range(LAYERS):
        ids = [choose.sample(range(EXPERTS), TOP_K) for _ in range(2)]
        for position, row in enumerate(ids):
            policy._buffer.put(position, layer, [row], [[0.5] * TOP_K])
        needed.append(sorted({layer * EXPERTS + expert for row in ids for expert in row}))
    fewest = _fewest(frozenset(held), tuple(map(tuple, needed)), slots)
    assert _verified(policy, held, needed, slots) == fewest


def test_victims_by_hand() -> None:
    # 4 layers of 5 experts; held: 0 and 1 (layer 0), 6 (layer 1), 15 and 16 (layer 3), used in that order
    buffer = LookaheadBuffer(LAYERS, EXPERTS)
    policy = WindowEviction(EVICTION.choose("lru").make(_shape(5)), buffer)
    for key in (0, 1, 6, 15, 16):
        policy.insert(key)
    assert policy.victim(()) == 0, "nothing is foreseen: lru"
    buffer.put(0, 0, [[0, 1]], [[0.9, 0.1]])
    buffer.put(0, 3, [[0, 1]], [[0.6, 0.4]])
    assert policy.victim(()) == 6, "all others are needed"
    assert policy.victim({6}) == 16, "of the last layer, the least sure one"
    assert policy.victim({6, 16}) == 15
    assert policy.victim({6, 15, 16}) == 1
    policy.passed = 0
    assert policy.victim({6}) == 0, "the first layer has been verified: lru among what is over"
    buffer.clear()
    policy.passed = -1
    policy.remove(0)
    assert policy.victim(()) == 1
    policy.clear()
    assert policy.victim(()) is None


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_a_running_model_is_given_the_window(scope: str) -> None:
    eviction = Eviction(EVICTION.choose("lru"), _shape(8), scope)
    by_layer, held = eviction.by_layer, [0, 1, 15, 16]
    for key in held:
        by_layer[key // EXPERTS].insert(key)
    buffer = LookaheadBuffer(LAYERS, EXPERTS)
    around = over_window(eviction, buffer, held)
    assert by_layer is eviction.by_layer, "the residency holds this list"
    assert list(map(id, around)) == list(map(id, dict.fromkeys(by_layer)))
    buffer.put(0, 0, [[0]], [[1.0]])
    buffer.put(0, 3, [[0, 1]], [[0.7, 0.3]])
    assert by_layer[0].victim(()) == 1
    assert by_layer[3].victim({1}) == 16
