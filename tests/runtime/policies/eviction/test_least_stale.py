"""What Least-Stale has to do with LRU (trap 2 under row A27), and where it does not."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from expertcast.runtime.recording.statistics import LayerStatistics
from tests.runtime.policies.eviction.replay import Visit, cache, run

LAYERS, EXPERTS, TOP_K = 4, 6, 2


def _forwards(seed: int, forecasts: str = "none") -> list[list[Visit]]:
    """Two experts per layer and forward, often those of the forward before; forecasts of two are `right` or `wrong`."""
    choose = random.Random(seed)
    chosen = [choose.sample(range(EXPERTS), TOP_K) for _ in range(LAYERS)]
    forwards = []
    for _ in range(12):
        chosen = [experts if choose.random() < 0.4 else choose.sample(range(EXPERTS), TOP_K) for experts in chosen]
        other = [choose.sample(range(EXPERTS), TOP_K) for _ in range(LAYERS)]
        wanted = {"none": [[]] * LAYERS, "right": chosen, "wrong": other}[forecasts]
        forwards.append(
            [
                Visit(needs=_keys(layer, chosen[layer]), wants=_keys(layer + 1, wanted[layer + 1] if layer < 3 else []))
                for layer in range(LAYERS)
            ]
        )
    return forwards


def _keys(layer: int, experts: Sequence[int]) -> list[int]:
    return [layer * EXPERTS + expert for expert in experts]


def _counts(policy: str, forwards: Sequence[Sequence[Visit]], slots: int, scope: str = "global") -> LayerStatistics:
    residency = cache(policy, layers=LAYERS, experts=EXPERTS, slots=slots, top_k=TOP_K, scope=scope)
    total = run(residency, forwards)
    total.waited_s = 0.0
    return total


@pytest.mark.parametrize("order", ["distance", "layer"])
def test_in_one_layer_it_is_lru(order: str) -> None:
    """One layer's experts are all stale or current by the time of their last use: the older goes first, as in LRU."""
    for seed in range(40):
        forwards = _forwards(seed)
        for slots in (8, 12, 16):
            least_stale = _counts(f"least_stale:order={order}", forwards, slots, "layer")
            assert least_stale == _counts("lru", forwards, slots, "layer")


@pytest.mark.parametrize("forecasts", ["none", "right"])
def test_in_order_of_layers_it_is_lru_while_the_cache_holds_one_forward_at_most(forecasts: str) -> None:
    """Then what is stale is from the forward before, from the running layer on: its layers are in order of time.

    Right forecasts only move that by a layer; with wrong ones it is not so.
    """
    for seed in range(40):
        forwards = _forwards(seed, forecasts)
        for slots in (4, 6, 8):
            assert _counts("least_stale:order=layer", forwards, slots) == _counts("lru", forwards, slots)


def _sums(forecasts: str, slots: int) -> dict[str, tuple[int, int]]:
    """Misses and collisions over 40 traces."""
    counts = {}
    for name in ("lru", "least_stale", "least_stale:order=layer"):
        runs = [_counts(name, _forwards(seed, forecasts), slots) for seed in range(40)]
        counts[name] = sum(one.misses for one in runs), sum(one.collisions for one in runs)
    return counts


def test_with_room_for_more_than_one_forward_nothing_collides() -> None:
    """LRU gives up what a late layer of the forward before used; in both orders stale experts of layers that have run
    go first."""
    found = _sums("none", 12)
    assert found["lru"][1] > 50
    assert found["least_stale"][1] == found["least_stale:order=layer"][1] == 0
    assert found["least_stale"][0] < found["lru"][0]


def test_with_wrong_forecasts_the_order_decides() -> None:
    """The paper's order then collides more often than LRU, the default order less often."""
    found = _sums("wrong", 12)
    assert found["least_stale:order=layer"][1] > 2 * found["lru"][1]
    assert found["least_stale"][1] < found["lru"][1]
    assert found["least_stale"][0] < found["lru"][0] < found["least_stale:order=layer"][0]


def test_below_one_forward_it_keeps_what_has_just_been_used() -> None:
    """Without forecasts, current experts are those whose layers run again last: fld gives them up, Least-Stale what is
    needed sooner."""
    forwards = [_forwards(seed) for seed in range(40)]
    misses = {name: sum(_counts(name, one, 6).misses for one in forwards) for name in ("fld", "least_stale", "lru")}
    assert misses["fld"] < misses["least_stale"] < misses["lru"]
