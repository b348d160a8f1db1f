"""Which experts are where: hand-worked traces, eviction rules, and the counts they leave.

Model: 4 layers of 8 experts, 2 per token (tiny qwen3_moe). Keys are layer * 8 + expert;
1.3 stands for expert 3 of layer 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch

from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors import ExpertcastError
from expertcast.predictors.base import Forecast
from expertcast.runtime.engine.cache import ExpertCache
from expertcast.runtime.policies import LRU, EvictionPolicy, Policies
from expertcast.runtime.recording.recorder import LayerStatistics, Observer, Observers, RunStatistics
from expertcast.runtime.simulation.machine import Case
from expertcast.runtime.simulation.simulator import VirtualRuntime
from expertcast.runtime.storage.layout import Region
from expertcast.runtime.storage.slots import SlotPool, SlotState
from expertcast.runtime.storage.store import ExpertStore
from expertcast.runtime.storage.transfer import Transfer
from tests.families.models import tiny_model
from tests.runtime.engine.evictions import eviction
from tests.runtime.links.manual import ManualLink
from tests.runtime.simulation.made import machine, trace


@cache
def _store() -> ExpertStore:
    view = find_moe_layers(tiny_model("qwen3_moe"))
    store = ExpertStore(view)
    store.pack(view)
    store.add_copies(("int8", "int4"))
    return store


def _residency(
    slots: int,
    *,
    keep: bool = True,
    scope: str = "global",
    link: ManualLink | None = None,
    policy: str | type[EvictionPolicy] = "lru",
    regions: tuple[Region, ...] = (),
) -> tuple[ExpertCache, ManualLink]:
    store, link = _store(), link or ManualLink()
    pool = SlotPool(store.layout, slots, store.device, regions)
    link.attach(store, pool)
    policies = eviction(policy, layers=4, experts=8, slots=slots, scope=scope, regions=regions)
    return ExpertCache(pool, link, policies, RunStatistics(4), experts=8, keep=keep), link


def _run(residency: ExpertCache, layer: int, experts: list[int]) -> None:
    keys = [layer * 8 + expert for expert in experts]
    residency.start_layer(layer, keys)
    residency.request(keys)
    residency.wait(keys)
    residency.release(keys)


def test_hand_worked_trace() -> None:
    """Six slots, layers 0 and 1, two tokens, forecasts for layer 1 after layer 0.

    step  layer needs      forecast    before          what happens
    1     0     0.0 0.1                empty           2 misses
                           1.0 1.1                     2 prefetches; 1.0 arrives, 1.1 stays queued
    2     1     1.0 1.2                                1.1 dropped (bytes taken back); 1.0 hit, in time; 1.2 miss
    3     0     0.0 0.2                0.0 0.1 1.0 1.2 1 hit, 1 miss (free slot)
                           1.2 1.3                     1.2 has a slot; 1.3 into the last free slot, not arrived
    4     1     1.2 1.3                                2 hits; 1.3 used but late
    5     0     0.4 0.5                all 6 taken     2 misses; victims by LRU are 0.1 (step 1) and 1.0 (step 2)

    Layer 0: 6 requests, 1 hit, 5 misses, 5 blocks. Layer 1: 4 requests, 3 hits, 1 miss, 2 prefetched (1.1 does not
    count), 2 used, 1 in time, 1 dropped, 3 blocks (1.0, 1.2, 1.3). Each lost one expert to step 5.
    """
    residency, link = _residency(6)
    block = residency.pool.layout.block_bytes
    for layer, needs, forecast in ((0, [0, 1], [8, 9]), (1, [0, 2], []), (0, [0, 2], [10, 11]), (1, [2, 3], [])):
        _run(residency, layer, needs)
        residency.prefetch(forecast)
        if forecast == [8, 9]:
            link.arrive(1)
    assert not residency.holds(9)
    _run(residency, 0, [4, 5])
    assert sorted(residency.pool.slots) == [0, 2, 4, 5, 10, 11]
    waited = [layer.waited_s for layer in residency.stats.layers]
    assert all(seconds > 0 for seconds in waited[:2])
    for layer in residency.stats.layers:
        layer.waited_s = 0.0
    assert residency.stats.layers == [
        LayerStatistics(requests=6, hits=1, misses=5, evicted=1, bytes_moved=5 * block),
        LayerStatistics(
            requests=4, hits=3, misses=1, evicted=1, prefetched=2, prefetched_used=2, prefetched_in_time=1, dropped=1,
            bytes_moved=3 * block,
        ),
        LayerStatistics(),
        LayerStatistics(),
    ]  # fmt: skip
    assert link.bytes_moved == 8 * block == residency.stats.total.bytes_moved
    assert residency.stats.hit_rate == 4 / 10
    assert residency.stats.as_dict()["per_layer"][1]["dropped"] == 1
    residency.stats.reset()
    assert residency.stats.total == LayerStatistics()


def test_misses_go_before_forecasts_and_promote_them() -> None:
    residency, link = _residency(8)
    residency.prefetch([8, 9, 10])
    residency.start_layer(1, [9, 11])
    residency.request([9, 11])
    assert link.submitted == [(8, "forecast"), (9, "forecast"), (10, "forecast"), (11, "urgent")]
    assert [copy.key for copy in link.queue if copy.urgent] == [9, 11]
    assert [copy.key for copy in link.queue] == [9, 11], "8 and 10 are useless now"


def test_nothing_needed_is_given_up() -> None:
    """Three slots: 0.0 runs, 1.1 is forecast and has arrived, 1.2 is forecast and queued."""
    residency, link = _residency(3)
    residency.request([0])
    residency.wait([0])
    residency.prefetch([9])
    link.arrive()
    residency.prefetch([10])
    residency.prefetch([11])
    assert residency.pool.state(residency.pool.slots.get(0) or 0) is SlotState.IN_USE
    assert not residency.holds(11), "no room for a further forecast"
    residency.request([1])
    assert sorted(residency.pool.slots) == [0, 1, 9], "the queued prefetch goes first"
    residency.wait([1])
    residency.request([2])
    assert sorted(residency.pool.slots) == [0, 1, 2], "then the arrived one, never what runs"


def test_a_copy_under_way_is_waited_for_when_nothing_else_is_left() -> None:
    residency, link = _residency(2)
    residency.request([0])
    residency.wait([0])
    residency.prefetch([9])
    link.start(link.queue[0])
    residency.request([1])
    assert link.copies == 2, "9 had to arrive before its slot could be given to 1"
    assert sorted(residency.pool.slots) == [0, 1]


def test_without_cache_slots_are_given_back() -> None:
    residency, link = _residency(6, keep=False)
    residency.prefetch([8, 9, 10])
    link.arrive(2)
    link.start(link.queue[0])
    _run(residency, 1, [1, 2])
    assert list(residency.pool.slots) == [], "8 was never used, 9 and 10 were"
    _run(residency, 1, [1, 2])
    assert residency.stats.layers[1].misses == 2
    assert len(residency.pool.free_slots[0]) == 6


def test_a_failed_copy_gives_its_slot_back() -> None:
    residency, link = _residency(4)
    residency.prefetch([8])
    link.queue[0].error = OSError("lost")
    link.arrive()
    residency.start_layer(1, [0])
    assert list(residency.pool.slots) == [], "a failed prefetch is forgotten"
    residency.request([8])
    link.queue[0].error = OSError("lost again")
    with pytest.raises(OSError, match="lost again"):
        residency.wait([8])
    assert len(residency.pool.free_slots[0]) == 4
    _run(residency, 1, [0])


def test_a_forecasts_copy_that_fails_is_no_error_of_whoever_takes_its_slot() -> None:
    residency, link = _residency(2)
    residency.request([0])
    residency.wait([0])
    residency.prefetch([9])
    link.start(link.queue[0])
    link.queue[0].error = OSError("lost")
    residency.request([1])
    residency.wait([1])
    assert sorted(residency.pool.slots) == [0, 1]
    assert residency.stats.layers[1].evicted == 0, "9 had lost its slot"


def test_promotions_are_in_the_order_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    residency, link = _residency(8)
    residency.prefetch([8, 9, 10, 11])
    promoted: list[int] = []
    monkeypatch.setattr(link, "promote", lambda copy: promoted.append(copy.key))
    residency.start_layer(1, [11, 8, 10, 9])
    residency.request([11, 8, 10, 9])
    assert promoted == [11, 8, 10, 9]


def test_abandon_unpins() -> None:
    residency, _ = _residency(4)
    residency.request([0, 1])
    residency.wait([0])
    residency.prefetch([8])
    residency.abandon()
    assert residency.pool.state(residency.pool.slots.get(0) or 0) is SlotState.READY
    assert not residency.holds(8)
    _run(residency, 2, [1, 2, 3, 4])


def _held(residency: ExpertCache) -> list[int]:
    return sorted(residency.pool.slots)


def test_layers_with_shares_leave_each_others_slots_alone() -> None:
    """Eleven slots: three for each of the first three layers, two for the last. Layer 0 fills its share, then needs two
    more; a forecast asks for four of layer 1, and layer 1 for two others."""
    residency, link = _residency(11, scope="layer")
    assert [residency.limit(layer) for layer in range(4)] == [3, 3, 3, 2]
    _run(residency, 3, [0, 1])
    _run(residency, 0, [0, 1, 2])
    assert [residency.free(layer) for layer in range(4)] == [0, 3, 3, 0]
    _run(residency, 0, [3, 4])
    assert _held(residency) == [2, 3, 4, 24, 25]
    residency.prefetch([16])
    residency.prefetch([8, 9, 10, 11])
    assert _held(residency) == [2, 3, 4, 8, 9, 10, 16, 24, 25], "the fourth has no room"
    residency.request([12, 13])
    assert _held(residency) == [2, 3, 4, 8, 12, 13, 16, 24, 25], "the layer's own queued forecasts, the last first"
    assert residency.stats.layers[1].dropped == 2
    assert [residency.free(layer) for layer in range(4)] == [0, 0, 2, 0]
    residency.reset()
    assert link.queue == []
    assert [residency.free(layer) for layer in range(4)] == [3, 3, 3, 2]


@pytest.mark.parametrize(("scope", "limits"), [("global", [5, 4, 5, 4]), ("layer", [3, 2, 2, 2])])
def test_layers_of_a_region_share_its_slots(scope: str, limits: list[int]) -> None:
    """Layers 1 and 3 have larger experts than 0 and 2: each pair evicts, and waits for, its own experts."""
    block = _store().layout.block_bytes
    residency, _ = _residency(9, scope=scope, regions=(Region((1, 3), 4, 2 * block), Region((0, 2), 5, block)))
    assert [residency.limit(layer) for layer in range(4)] == limits
    for layer in range(4):
        _run(residency, layer, [0, 1])
    assert [residency.free(layer) for layer in range(4)] == ([1, 0, 1, 0] if scope == "global" else [1, 0, 0, 0])
    assert [residency.pool.slots[key] for key in (0, 1, 8, 9, 16, 17, 24, 25)] == [4, 5, 0, 1, 6, 7, 2, 3]
    assert [len(residency.pool.block(slot)) // block for slot in range(9)] == [2] * 4 + [1] * 5
    if scope == "layer":
        return
    _run(residency, 3, [2])
    assert not residency.holds(8), "1.0 gave its slot, though 0.0 is older"
    residency.window.add(25)
    assert residency.load_ahead(8), "for 1.1"
    assert residency.holds(0)
    residency.start_layer(1, [10, 11, 12, 13])
    residency.request([10, 11, 12, 13])
    assert sorted(residency.pool.slots) == [0, 1, 10, 11, 12, 13, 16, 17], "a demand takes no slot of the others either"


def test_a_reset_cache_is_a_new_one() -> None:
    """A forward, forecasts and a window are cut short anywhere; afterwards the same calls do what they did at first."""
    residency, _ = _residency(4)
    found = []
    for _ in range(2):
        residency.start_layer(0, [0, 1])
        residency.request([0, 1], {1: "int4"})
        residency.wait([0])
        residency.prefetch([8, 9])
        residency.window.add(17)
        assert residency.is_prefetched_for(1)
        found.append((_held(residency), residency.held(0), residency.load_ahead(17)))
        residency.reset()
        residency.stats.reset()
        assert residency.idle
        assert not any(
            (list(residency.pool.slots), residency.running, residency.window.keys, residency.is_prefetched_for(1))
        )
        _run(residency, 1, [0, 1, 2, 3])
        _run(residency, 2, [0, 1, 2, 3])
        assert residency.stats.total.collisions == residency.stats.total.prefetched_used == 0
        residency.reset()
        residency.stats.reset()
    assert found == [([0, 1, 8, 9], {0: "full", 1: "int4"}, False)] * 2


def test_an_expert_that_a_forecast_brings_back_in_time_is_no_collision() -> None:
    """Two slots: layer 1 takes both, a forecast brings 0 back, and layer 0 hits it."""
    residency, link = _residency(2)
    _run(residency, 0, [0, 1])
    _run(residency, 1, [0, 1])
    residency.prefetch([0])
    link.arrive()
    _run(residency, 0, [0, 2])
    count = residency.stats.layers[0]
    assert (count.hits, count.misses, count.evicted, count.collisions) == (1, 3, 2, 0)


def test_an_expert_that_comes_back_in_the_same_forward_is_a_collision() -> None:
    residency, _ = _residency(2)
    residency.start_pass(False)
    _run(residency, 0, [0, 1])
    _run(residency, 1, [0, 1])
    _run(residency, 0, [0, 2])
    assert residency.stats.layers[0].collisions == 1, "0 was given up, 2 was never there"
    residency.start_pass(False)
    _run(residency, 1, [0, 1])
    assert residency.stats.layers[1].collisions == 0, "they were given up in the forward before"


def test_loading_ahead_takes_what_is_needed_last() -> None:
    """Four slots: 0.0 and 0.1 are not needed, 3.0 and 2.0 are kept by the window. For layer 1 an unneeded expert goes
    first, then those of the window from the last layer on, none of a nearer layer, and none that is on its way."""
    residency, link = _residency(4)
    _run(residency, 0, [0, 1])
    for key in (24, 16):
        residency.window.add(key)
        assert residency.load_ahead(key)
    link.arrive()
    assert residency.idle
    loaded = []
    for key in (8, 9, 10, 11, 12):
        residency.window.add(key)
        loaded.append(residency.load_ahead(key))
        link.arrive()
        assert residency.idle
        loaded.append(_held(residency))
    assert loaded == [
        True, [1, 8, 16, 24], True, [8, 9, 16, 24], True, [8, 9, 10, 16], True, [8, 9, 10, 11], False, [8, 9, 10, 11]
    ]  # fmt: skip
    assert residency.window.pop(1) == {8, 9, 10, 11, 12}
    assert residency.window.keys == {16, 24}
    residency.window.clear()
    assert not residency.window.keys
    assert residency.window.pop(2) == set()
    residency.window.add(17)
    assert residency.load_ahead(17)
    assert _held(residency) == [9, 10, 11, 17]


def test_a_running_layer_takes_what_the_window_keeps_for_later_ones() -> None:
    """Three slots, all of the window: 2.0 and 3.0 have arrived, 3.1 is on its way and stays. Layer 2 loses none of its
    own; with shares nothing of another layer's is of use."""
    residency, link = _residency(3)
    for key in (16, 24, 25):
        residency.window.add(key)
        residency.load_ahead(key)
    link.arrive(2)
    assert not residency.idle
    residency.request([17])
    assert _held(residency) == [16, 17, 25]
    shared, link = _residency(8, scope="layer")
    for key in (16, 17, 24):
        shared.window.add(key)
        assert shared.load_ahead(key)
    link.arrive()
    assert shared.idle
    assert not shared.load_ahead(18)
    shared.request([18])
    assert _held(shared) == [17, 18, 24], "of what is kept for its own layer"


def test_what_is_not_needed_after_all_is_taken_back() -> None:
    """0.0 has arrived, 0.1 is on its way, 0.2 was requested since, 0.3 waits for its turn: 0.3 goes."""
    residency, link = _residency(6)
    residency.prefetch([0, 1, 2, 3])
    link.arrive(1)
    link.start(link.queue[0])
    residency.request([2])
    residency.cancel_prefetches(range(8))
    assert _held(residency) == [0, 1, 2]
    assert (residency.stats.total.prefetched, residency.stats.total.dropped) == (3, 1)
    residency.wait([2])
    assert residency.stats.total.bytes_moved == 3 * residency.pool.layout.block_bytes


def test_slots_are_freed_up_in_the_policys_order() -> None:
    """Six slots: 0.0 is to stay, 0.1 is forecast, 1.0 runs, 2.0 is on its way; 0.2 and 0.3 can go."""
    residency, _ = _residency(6)
    _run(residency, 0, [0, 1, 2, 3])
    residency.prefetch([1])
    residency.prefetch([16])
    residency.request([8])
    residency.wait([8])
    residency.free_up(1, 1, {0})
    assert _held(residency) == [0, 1, 3, 8, 16]
    residency.free_up(1, 1, {0})
    assert len(residency.pool.free_slots[0]) == 1
    residency.free_up(1, 4, {0})
    assert _held(residency) == [0, 1, 8, 16]
    assert residency.stats.layers[0].evicted == 2


def test_lower_precisions() -> None:
    """0.0 comes in int4: it is a hit in int4 and a miss where it is to be full, for int8 is better and full is best."""
    residency, link = _residency(4)
    sizes = {level: link.block_bytes(level) for level in ("full", "int8", "int4")}
    moved = []
    for level in ("int4", "int4", "int8", "int4", "full", "int8"):
        residency.start_layer(0, [0, 1])
        residency.request([0, 1], {0: level})
        residency.wait([0, 1])
        residency.release([0, 1])
        moved.append(residency.stats.total.bytes_moved)
        assert residency.pool.block(residency.pool.slots[1]).equal(_store().block(1))
        assert residency.pool.block(residency.pool.slots[0]).equal(_store().block(0)) == (
            level == "full" or len(moved) > 5
        )
    first = sizes["full"] + sizes["int4"]
    second = first + sizes["int8"]
    assert moved == [first, first, second, second, second + sizes["full"], second + sizes["full"]]
    assert residency.held(0) == {0: "full", 1: "full"}
    assert (residency.stats.total.misses, residency.stats.total.evicted) == (4, 0)


def test_only_full_precision_is_kept() -> None:
    """Four copies in int4 (arrived, computed with, under way, queued) all go, and the full one stays. One that fails
    meanwhile is nobody's error."""
    for failing in (False, True):
        residency, link = _residency(6)
        residency.request([0, 1], {0: "int4"})
        residency.wait([0, 1])
        residency.release([0, 1])
        residency.start_layer(1, [8, 9, 10])
        residency.request([8, 9, 10], dict.fromkeys((8, 9, 10), "int4"))
        link.arrive(1)
        link.start(link.queue[0])
        link.queue[0].error = OSError("lost") if failing else None
        residency.start_layer(1, [])
        residency.keep_full_only()
        assert _held(residency) == [1]
        assert residency.idle
        assert len(residency.pool.free_slots[0]) == 5
        blocks = link.block_bytes("full") + 3 * link.block_bytes("int4")
        assert residency.stats.total.bytes_moved == blocks, "the queued one was taken back"
        assert residency.held(0) == {1: "full"}


def test_a_draft_that_waits_for_nothing_sees_only_what_has_arrived() -> None:
    residency, link = _residency(4)
    residency.prefetch([8, 9])
    assert residency.held(1) == {0: "full", 1: "full"}
    residency.only_arrived = True
    assert residency.held(1) == {}
    link.arrive(1)
    assert residency.held(1) == {0: "full"}
    assert residency.held(2) == {}
    link.arrive()
    assert residency.held(1) == {0: "full", 1: "full"}
    assert residency.idle


class TimedLink(ManualLink):
    """A copy in full takes 2 s, and the test says what time it is."""

    copy_s = 2.0  # type: ignore[assignment]
    now = 0.0

    def clock(self) -> float:
        return self.now


def test_the_backlog_of_a_paced_cache() -> None:
    """Copies follow one another: each takes 2 s of the link, one in int4 its share of that."""
    residency, link = _residency(8, link=TimedLink())
    residency.prefetch([8])
    assert residency.backlog_s(0.0) == 0, "not kept so far"
    residency.reset()
    residency.paced = True
    residency.prefetch([8, 9, 10])
    assert [residency.backlog_s(now) for now in (0.0, 1.5, 6.0, 7.0)] == [6.0, 4.5, 0.0, 0.0]
    residency.start_layer(1, [8, 9])
    assert residency.backlog_s(1.0) == 3.0, "10 was taken back"
    link.arrive(1)
    assert not residency.idle
    assert residency.backlog_s(1.0) == 2.0, "one copy is left, sooner than was to be expected"
    link.arrive()
    assert residency.idle
    assert residency.backlog_s(1.0) == 0.0
    link.now = 10.0
    share = link.block_bytes("int4") / link.block_bytes("full")
    residency.request([0, 1], {0: "int4"})
    assert residency.backlog_s(10.0) == pytest.approx(2 + 2 * share)


def test_seconds_that_the_models_thread_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy holds the thread up for 3 s as it is asked for, and for 5 as it is waited for."""
    residency, link = _residency(4, link=TimedLink())
    link.blocked_s, wait = 3.0, link.wait

    def slow_wait(copy: Transfer) -> None:
        wait(copy)
        link.now += 5.0

    monkeypatch.setattr(link, "wait", slow_wait)
    _run(residency, 1, [0, 1])
    assert [layer.waited_s for layer in residency.stats.layers] == [0.0, 16.0, 0.0, 0.0]
    assert residency.waited_s == 16.0
    _run(residency, 1, [0, 1])
    assert residency.waited_s == 16.0, "both are there"


def test_the_link_orders_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    residency, link = _residency(3)
    monkeypatch.setattr(link, "in_order", lambda keys: sorted(keys, reverse=True))
    _run(residency, 0, [0, 2, 1])
    assert [key for key, _ in link.submitted] == [2, 1, 0]


def test_policy_and_link_hear_of_everything_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[object, ...]] = []

    class Heard(LRU):
        def start_pass(self, fresh: bool) -> None:
            heard.append(("start", fresh))

        def start_layer(self, layer: int, keys: Sequence[int]) -> None:
            heard.append(("layer", layer, keys))

        def insert(self, key: int, full: bool = True) -> None:
            heard.append(("insert", key, full))
            super().insert(key, full)

        def touch(self, keys: Sequence[int]) -> None:
            heard.append(("touch", keys))

        def use(self, keys: Sequence[int]) -> None:
            heard.append(("use", keys))
            super().use(keys)

        def remove(self, key: int) -> None:
            heard.append(("remove", key))
            super().remove(key)

    residency, link = _residency(4, policy=Heard)
    monkeypatch.setattr(link, "mark_read", lambda slots: heard.append(("read", slots)))
    residency.start_pass(True)
    residency.start_layer(0, [0, 1])
    residency.request([0, 1], {1: "int4"})
    residency.wait([0, 1])
    expanded = ("read", [1])
    assert heard[:6] == [
        ("start", True),
        ("layer", 0, [0, 1]),
        ("insert", 0, True),
        ("insert", 1, False),
        expanded,
        ("use", [0, 1]),
    ]
    residency.release([0, 1])
    residency.prefetch([8])
    residency.prefetch([9, 8])
    residency.start_layer(1, [9])
    assert heard[6:] == [
        ("read", [0, 1]), ("touch", []), ("insert", 8, True), ("touch", [8]), ("insert", 9, True), ("layer", 1, [9]),
        ("remove", 8),
    ]  # fmt: skip


def test_what_forecasts_ask_for_is_told_to_every_observer() -> None:
    class Asked(Observer):
        def __init__(self) -> None:
            self.heard: list[tuple[int, list[int]]] = []

        def requested(self, layer: int, keys: Sequence[int]) -> None:
            self.heard.append((layer, list(keys)))

    first, second = Asked(), Asked()
    link = ManualLink()
    link.observer = Observers([first, second])
    residency, _ = _residency(4, link=link)
    residency.prefetch([])
    residency.prefetch([9, 8])
    assert first.heard == second.heard == [(1, [9, 8])]
    assert residency.is_prefetched_for(1)
    assert not residency.is_prefetched_for(2)
    residency.start_layer(1, [9])
    assert not residency.is_prefetched_for(1)


def test_without_cache_a_forecast_keeps_what_a_layer_has_used() -> None:
    """0.0 and 0.1 run, and arrive before they are waited for; 0.1 and 1.0 are forecast, 2.0 is the window's: these
    stay, and 0.0 goes. A forward that is cut short ends all of that."""
    residency, link = _residency(6, keep=False)
    residency.request([0, 1])
    link.arrive()
    residency.prefetch([1])
    residency.wait([0, 1])
    residency.window.add(16)
    residency.load_ahead(16)
    residency.prefetch([8])
    residency.release([0, 1])
    link.arrive()
    assert residency.idle
    assert _held(residency) == [1, 8, 16]
    residency.prefetch([24])
    link.start(link.queue[0])
    residency.abandon()
    assert _held(residency) == [24], "what is under way goes when it has arrived"
    link.arrive()
    assert residency.idle
    assert _held(residency) == []


def test_a_refused_copy_takes_no_slot() -> None:
    residency, link = _residency(2)
    with pytest.raises(ExpertcastError):
        residency.request([0], {0: "int2"})
    residency.abandon()
    assert list(residency.pool.slots) == link.queue == []
    assert len(residency.pool.free_slots[0]) == 2
    assert residency.stats.total.bytes_moved == 0
    _run(residency, 0, [0, 1])


def test_slots_by_hand() -> None:
    layout = _store().layout
    pool = SlotPool(layout, 3, torch.device("cpu"))
    assert [pool.take(key) for key in (7, 8, 9)] == [0, 1, 2]
    with pytest.raises(IndexError):
        pool.take(10)
    pool.arrived(7)
    pool.mark([7], SlotState.IN_USE)
    assert [pool.key_of(slot) for slot in range(3)] == [7, 8, 9]
    assert [pool.state(slot) for slot in range(3)] == [SlotState.IN_USE, SlotState.LOADING, SlotState.LOADING]
    for misuse, key in ((pool.release, 7), (pool.take, 8)):
        with pytest.raises(AssertionError):
            misuse(key)
    pool.release(8)
    assert (list(pool.slots), pool.key_of(1), pool.state(1)) == ([9], None, SlotState.FREE)
    assert pool.take(11) == 1
    pool.clear()
    assert (list(pool.slots), pool.key_of(0), pool.state(2), pool.take(12)) == ([], None, SlotState.FREE, 0)
    assert pool.nbytes == 3 * layout.block_bytes
    assert pool.block(0).data_ptr() % 4096 == 0
    for slot in range(3):
        pool.block(slot).fill_(slot + 1)
    for name, view in pool.views.items():
        assert [view[slot].view(torch.uint8).unique().tolist() for slot in range(3)] == [[1], [2], [3]], name
    pool.free()
    assert pool.nbytes == len(pool.views) == 0


# Slots given up before a layer's routing is known, in the flow that runtime and simulator share

EXPERTS = 8
SLOTS = 6


def runtime(eviction: str = "lru", gap: str = "gap:tau=0.0") -> VirtualRuntime:
    """Two layers of eight experts, two per token, six slots; nothing is prefetched."""
    made = trace([[[0, 1], [0, 1]]] * 2, experts=EXPERTS)
    policies = Policies(eviction=eviction, prefetch="none", pre_eviction=gap)
    return VirtualRuntime(made, Case(policies=policies, slots=SLOTS, machine=machine(2)))


def run(made: VirtualRuntime, layer: int, experts: Sequence[int]) -> None:
    """The layer runs with these experts."""
    keys = [layer * EXPERTS + expert for expert in experts]
    for chunk in made.flow.begin(layer, keys):
        made.residency.wait(chunk)
        made.residency.release(chunk)


def hint(made: VirtualRuntime, rows: list[list[float]]) -> None:
    """A forecast for layer 1 with these softmax probabilities."""
    probability_TE = torch.tensor(rows)
    weights_TK, ids_TK = probability_TE.topk(2)
    forecast = Forecast(layer=1, logits_TE=probability_TE.log(), topk_ids_TK=ids_TK, topk_weights_TK=weights_TK)
    made.flow.hint(forecast, ids_TK.tolist(), weights_TK.tolist())


def held(made: VirtualRuntime, layer: int) -> set[int]:
    return set(made.residency.held(layer))


SHARP = [0.4, 0.3, 0.1, 0.08, 0.05, 0.04, 0.02, 0.01]
"""Predicts experts 0 and 1; no ties."""


@pytest.mark.parametrize(("resident", "left"), [([2, 3], 2), ([2, 3, 4, 5], 4), ([2, 3, 4, 5, 6], 4), ([2, 7, 0], 3)])
def test_no_more_is_given_up_than_is_not_free_already(resident: list[int], left: int) -> None:
    """Delta = 2 (1 where expert 0 is there) is the number of free slots wanted: max(0, Delta - free) are evicted."""
    made = runtime()
    run(made, 1, resident)
    hint(made, [SHARP])
    assert len(held(made, 1)) == left
    assert made.residency.stats.total.evicted == len(resident) - left


@pytest.mark.parametrize("splits", [True, False])
def test_a_scan_runs_in_parts_unless_the_kernel_cannot(splits: bool) -> None:
    """A prompt's experts that fit take turns in a few slots; a kernel that runs no parts gets them whole."""
    made = runtime("lrfu", "none")
    made.flow.splits = splits
    made.flow.start_pass(True)
    run(made, 1, [0, 1, 2])
    chunks = made.flow.begin(0, [0, 1, 2, 3, 4, 5])
    assert (len(chunks) > 1) == splits
    assert sorted(key for chunk in chunks for key in chunk) == [0, 1, 2, 3, 4, 5]


def test_what_is_predicted_is_never_given_up() -> None:
    """All slots are taken and the predicted expert 0 is the least recently used one: 2 goes in its place."""
    made = runtime()
    run(made, 1, [0])
    run(made, 1, [2, 3, 4, 5, 6])
    hint(made, [SHARP])
    assert held(made, 1) == {0, 3, 4, 5, 6}


def test_nor_where_nothing_else_could_go() -> None:
    """Both layers' residents are predicted or running: the target is not reached, and nothing predicted pays for it."""
    made = runtime(gap="gap:tau=1.0,r_max=6")
    run(made, 1, [0, 1])
    hint(made, [SHARP])
    assert held(made, 1) == {0, 1}
    assert made.residency.stats.total.evicted == 0


def test_ties_are_counted_up_to_the_first_gap() -> None:
    """After the second expert .005, then .095, then .005: one tie, so one slot; the paper's sum would be two."""
    rows = [[0.4, 0.2, 0.195, 0.1, 0.095, 0.005, 0.003, 0.002]]
    made = runtime(gap="gap:tau=0.02,r_max=3")
    run(made, 1, [0, 1, 4, 5, 6, 7])
    hint(made, rows)
    assert made.residency.stats.total.evicted == 1


TOKENS = [[0.50, 0.30, 0.11, 0.01, 0.02, 0.02, 0.02, 0.02], [0.30, 0.50, 0.01, 0.08, 0.04, 0.03, 0.02, 0.02]]
"""Both predict 0 and 1; behind them .34 in the mean, .68 in the sum, .39 between maxima, .19 in the first row."""


@pytest.mark.parametrize(("tau", "ties"), [(0.35, 1), (0.33, 0)])
def test_the_prior_is_the_mean_over_tokens(tau: float, ties: int) -> None:
    made = runtime(gap=f"gap:tau={tau},r_max=1")
    run(made, 1, [0, 1, 4, 5, 6, 7])
    hint(made, TOKENS)
    assert made.residency.stats.total.evicted == ties


def test_importance_weighs_the_mean_over_tokens() -> None:
    """Expert 2 has .0475 in the mean and .09 at most, expert 3 .05 twice: one slot is wanted, and 2 goes."""
    rows = [[0.40, 0.20, 0.090, 0.05, 0.06, 0.06, 0.06, 0.080], [0.40, 0.20, 0.005, 0.05, 0.08, 0.08, 0.08, 0.105]]
    made = runtime(eviction="importance:alpha=0.0")
    run(made, 1, [0, 2, 3, 4, 5, 6])
    hint(made, rows)
    assert held(made, 1) == {0, 3, 4, 5, 6}
