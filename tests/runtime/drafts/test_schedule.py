"""Prefetch for verification: loads and evictions in cases worked out by hand.

Model: 3 layers of 8 experts, 2 per token. Keys are layer * 8 + expert; 1.3 stands for expert 3 of layer 1, key 11.
"""

from __future__ import annotations

import random

import pytest
import torch

from expertcast import offload
from expertcast.data.batch import RouterCall
from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors.view import ModelShape
from expertcast.runtime.drafts.prefetch import LookaheadBuffer, Schedule
from expertcast.runtime.engine.cache import ExpertCache
from expertcast.runtime.links.emulated import EmulatedLink
from expertcast.runtime.policies import Policies
from expertcast.runtime.recording.recorder import RunStatistics
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from tests.runtime.drafts.loops import prompt, tiny
from tests.runtime.engine.evictions import eviction
from tests.runtime.links.manual import ManualLink


def made(slots: int, link: ManualLink | None = None) -> tuple[Schedule, ExpertCache, ManualLink]:
    view = find_moe_layers(tiny("qwen3_moe"))
    store = ExpertStore(view)
    store.pack(view)
    pool, link = SlotPool(store.layout, slots, store.device), link or ManualLink()
    link.attach(store, pool)
    policies = eviction(layers=3, experts=8, slots=slots)
    residency = ExpertCache(pool, link, policies, RunStatistics(3), experts=8)
    return Schedule(residency, ModelShape(layers=3, experts=8, top_k=2, hidden=32)), residency, link


def route(schedule: Schedule, layer: int, ids: list[int], weights: list[float]) -> None:
    """One token's routing in a draft."""
    routed(schedule, layer, [ids], [weights])


def routed(schedule: Schedule, layer: int, ids: list[list[int]], weights: list[list[float]]) -> None:
    """Routing of several tokens."""
    call = object.__new__(RouterCall)
    for name, value in (
        ("layer", layer), ("ids_TK", torch.tensor(ids)), ("weights_TK", torch.tensor(weights)),
    ):  # fmt: skip
        object.__setattr__(call, name, value)
    schedule.routed(call)


def guided(schedule: Schedule) -> None:
    """A cycle whose second token is drafted; the first one's routing said nothing, and copies take no time."""
    schedule.begin()
    schedule.draft(0)
    schedule.buffer.put(0, [], ())
    schedule.drafted()
    schedule.draft(1)


def hold(residency: ExpertCache, link: ManualLink, keys: list[int]) -> None:
    """Bring experts in as a layer does, one after another."""
    for key in keys:
        residency.start_layer(key // 8, [key])
        residency.request([key])
        residency.wait([key])
        residency.release([key])
    link.submitted.clear()


def asked(link: ManualLink) -> list[int]:
    return [key for key, _ in link.submitted]


class _Measured(ManualLink):
    """A copy takes a second; the clock is the test's."""

    now = 0.0
    copy_s = 1.0  # type: ignore[assignment]

    def clock(self) -> float:
        return self.now


def test_phases_follow_the_bandwidth() -> None:
    """A pass takes 4 s, in which the link brings 4 copies, with one behind them. Nearest layer first, confident first.

    First token: layer 0 wants 0.1 (.9) and 0.2 (.1, less than half of the mean .5), layer 1 wants 1.1 and 1.2 (.5). No
    pass has been measured: one goes. Second token, guided: it is still on its way, 4 more: 1.2, 1.1, then, as confident
    ones are out, 0.2, and 1.5. Verification: what is left, however much. First token of the next cycle: half of it.
    """
    schedule, _, link = made(24, _Measured())
    schedule.begin()
    schedule.draft(0)
    route(schedule, 0, [1, 2], [0.9, 0.1])
    route(schedule, 1, [1, 2], [0.5, 0.5])
    link.now = 4.0
    schedule.drafted()
    assert asked(link) == [1]
    schedule.draft(1)
    route(schedule, 0, [1, 2], [0.9, 0.1])  # known already: it only calls for more
    assert asked(link) == [1, 10, 9, 2]
    for layer in (1, 2):
        route(schedule, layer, [4, 5], [0.5, 0.5])
    link.now = 8.0
    schedule.drafted()
    assert asked(link)[4:] == [13]
    schedule.verify()
    assert asked(link)[5:] == [12, 21, 20]
    assert [kind for _, kind in link.submitted] == ["forecast"] * 8
    link.arrive()
    schedule.end()
    schedule.begin()
    schedule.draft(0)
    route(schedule, 0, [3, 4], [0.5, 0.5])
    route(schedule, 1, [3, 6], [0.5, 0.5])
    assert asked(link)[8:] == [4, 3, 14]


def test_what_is_given_up() -> None:
    """4 slots: 0.7 (used first) and 1.7 are unprotected, 2.1 and 1.1 are in the window. 0.1, 0.2 and 0.3 are requested.

    0.1 evicts 0.7 (least recently used), 0.2 evicts 1.7, 0.3 evicts 2.1 (the farthest of the window). 1.2 evicts no
    expert: 1.1 is of the same layer, and experts of nearer layers stay.
    """
    schedule, residency, link = made(4)
    hold(residency, link, [7, 15, 17, 9])
    guided(schedule)
    route(schedule, 2, [1, 1], [0.5, 0.5])
    route(schedule, 1, [1, 1], [0.5, 0.5])
    lost = []
    for expert in (1, 2, 3):
        before = set(residency.pool.slots)
        route(schedule, 0, [expert, expert], [0.5, 0.5])
        lost.append(before - set(residency.pool.slots))
    assert lost == [{7}, {15}, {17}]
    link.arrive()
    held = dict(residency.pool.slots)
    assert asked(link) == [1, 2, 3]
    route(schedule, 1, [2, 2], [0.5, 0.5])
    assert residency.pool.slots == held
    assert asked(link) == [1, 2, 3]


def test_a_layer_takes_back_what_it_does_not_need() -> None:
    """Verification reaches layer 0 with 0.1 alone: of 0.1 and 0.2, both queued, 0.2 is not copied."""
    schedule, residency, link = made(8)
    guided(schedule)
    route(schedule, 0, [1, 2], [0.5, 0.5])
    schedule.drafted()
    schedule.verify()
    schedule.reached(0, [1])
    assert {copy.key for copy in link.queue} == {1}
    assert set(residency.pool.slots) == {1}
    assert residency.stats.layers[0].dropped == 1


def test_the_end_of_a_cycle_takes_back_the_rest() -> None:
    schedule, residency, link = made(8)
    guided(schedule)
    route(schedule, 1, [1, 2], [0.5, 0.5])
    link.arrive(1)
    schedule.end()
    assert not link.queue
    assert len(residency.pool.slots) == 1
    assert not residency.window.keys


@pytest.mark.parametrize("seed", range(3))
def test_new_experts_as_sets_have_them(seed: int) -> None:
    choose = random.Random(seed)
    buffer, held, seen = LookaheadBuffer(30), set(choose.sample(range(30), 8)), set[int]()
    for position in range(6):
        before = len(seen - held)
        for _ in range(3):
            keys = choose.choices(range(30), k=6)
            buffer.put(position, keys, held)
            seen.update(keys)
        assert buffer.growth[position] == len(seen - held) - before
    assert buffer.positions == 6
    buffer.clear()
    assert (buffer.positions, buffer.growth) == (0, [])


def test_what_the_slots_cannot_keep_comes_again() -> None:
    """Two layers of 8, 3 slots, which hold experts 0, 1 of layer 0 and 0 of layer 1 (keys 0, 1, 8).

    Position 0 needs 0 and 1 of layer 0, 0 and 2 of layer 1: four, one of them new; one of the three that are held has
    to go for it and comes again: 2 copies. Position 1 adds 3 and 4 of layer 0: six in all, three new, three too many,
    so that all three held ones come again: 2 new and 2 more than before. With enough slots: 1 and 2.
    """
    for slots, growth in ((3, [2, 4]), (16, [1, 2])):
        buffer = LookaheadBuffer(slots)
        buffer.put(0, [0, 1, 8, 10], {0, 1, 8})
        buffer.put(1, [3, 4], {0, 1, 8})
        assert buffer.growth == growth


@pytest.mark.parametrize("draft", ["int4", "resident"])
def test_what_is_loaded_ahead_does_not_miss(draft: str) -> None:
    """The same text with and without loading ahead: fewer misses."""
    found = {}
    for prefetch in (True, False):
        policies = Policies(eviction="lru")  # lrfu evicts first what was loaded and not used, where slots are so few
        with offload(tiny("qwen3_moe"), slots=8, link=EmulatedLink(1e9, 2e-5), policies=policies) as opened:
            assert opened.drafting is not None
            if not prefetch:
                opened.drafting.schedule.load = lambda: None  # type: ignore[method-assign]
            text = opened.generate(prompt(), max_new_tokens=24, do_sample=False, draft=draft, draft_length=3)
            layers = opened.stats.layers
            found[prefetch] = text, sum(each.misses for each in layers), sum(each.prefetched for each in layers)
    assert torch.equal(found[True][0], found[False][0])
    assert found[True][1] < found[False][1]
    assert found[True][2] > found[False][2]


def test_routing_of_draft_and_verification_is_compared() -> None:
    """Two drafted tokens of two sequences; the last position runs in the verification only."""
    schedule, _, _ = made(24)
    schedule.begin()
    for position, ids in enumerate(([[1, 2], [3, 4]], [[5, 6], [1, 2]])):
        schedule.draft(position)
        routed(schedule, 0, ids, [[0.6, 0.4]] * 2)
        schedule.drafted()
    schedule.verify()
    exact = [[2, 1], [6, 5], [7, 0], [4, 3], [1, 3], [7, 0]]
    weights = [[0.4, 0.6], [0.7, 0.3], [0.5, 0.5], [0.9, 0.1], [0.8, 0.2], [0.5, 0.5]]
    routed(schedule, 0, exact, weights)
    routed(schedule, 1, exact, weights)  # a layer that the draft left out
    assert schedule.matches == [1, 3, 4]
    schedule.begin()
    assert schedule.matches == [0, 0, 0]
