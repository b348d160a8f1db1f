"""The lookahead buffer: unions and new experts, by hand and against sets."""

from __future__ import annotations

import random

import pytest

from expertcast.predictors import ExpertcastError
from expertcast.runtime.drafts.prefetch import LookaheadBuffer


def test_a_buffer_worked_by_hand() -> None:
    # 2 layers of 4 experts: layer 0 has keys 0..3, layer 1 keys 4..7
    buffer = LookaheadBuffer(2, 4)
    assert buffer.positions == 0
    assert buffer.union(0) == {}
    buffer.put(0, 0, [[1, 2], [2, 3]], [[0.7, 0.3], [0.6, 0.4]])  # two rows share expert 2: .3 and .6
    buffer.put(0, 1, [[0, 1]], [[0.9, 0.1]])
    assert buffer.union(0) == {1: 0.7, 2: 0.6, 3: 0.4}
    assert buffer.union(1) == {4: 0.9, 5: 0.1}
    held = {1, 4}
    assert buffer.new_experts(held) == 3  # 2, 3 and 5
    buffer.put(1, 0, [[0, 1]], [[0.2, 0.8]])
    assert buffer.new_experts(held) == 4  # before layer 1: 0 came, 1 was there
    buffer.put(1, 1, [[1, 2]], [[0.5, 0.5]])
    held |= {2, 3, 5, 0}  # they were asked for since, and are copies of this cycle all the same
    assert buffer.new_experts(held) == 5  # key 6; key 5 was counted before
    assert buffer.new_experts(held, 1) == 3
    assert buffer.growth == [3, 2]
    assert buffer.union(0) == {0: 0.2, 1: 0.8, 2: 0.6, 3: 0.4}
    assert buffer.union(0, 1) == {1: 0.7, 2: 0.6, 3: 0.4}  # expert 1 was .7 then
    assert buffer.union(1, 1) == {4: 0.9, 5: 0.1}
    assert buffer.positions == 2
    assert 6 in buffer
    assert 7 not in buffer
    buffer.clear()
    assert (buffer.positions, buffer.growth, buffer.new_experts(())) == (0, [], 0)
    assert 6 not in buffer


def test_what_was_put_later_at_a_counted_place_is_counted_there() -> None:
    # what several rows fed in several passes: a position grows after it was asked about
    buffer = LookaheadBuffer(1, 8)
    buffer.put(0, 0, [[0, 1]], [[0.5, 0.5]])
    buffer.put(1, 0, [[2, 3]], [[0.5, 0.5]])
    assert buffer.new_experts({0}) == 3
    buffer.put(0, 0, [[4, 5]], [[0.5, 0.5]])
    assert buffer.new_experts({0, 4}) == 4
    assert buffer.growth == [2, 2]


@pytest.mark.parametrize("seed", range(5))
def test_as_sets_have_it(seed: int) -> None:
    choose = random.Random(seed)
    layers, experts, top_k, rows = 3, 10, 3, 2
    buffer = LookaheadBuffer(layers, experts)
    held = set(choose.sample(range(layers * experts), 8))
    seen: list[list[dict[int, float]]] = []
    for position in range(6):
        seen.append([{} for _ in range(layers)])
        for layer in range(layers):
            ids = [choose.sample(range(experts), top_k) for _ in range(rows)]
            sure = [[choose.random() for _ in range(top_k)] for _ in range(rows)]
            buffer.put(position, layer, ids, sure)
            for row, own in zip(ids, sure, strict=True):
                for expert, value in zip(row, own, strict=True):
                    key = layer * experts + expert
                    seen[-1][layer][key] = max(value, seen[-1][layer].get(key, 0.0))
        new = [{key for entry in seen[:n] for own in entry for key in own} - held for n in range(1, position + 2)]
        assert buffer.new_experts(held) == len(new[-1])
        assert buffer.new_experts(held, 1) == len(new[0])
        assert sum(buffer.growth) == len(new[-1])
    for layer in range(layers):
        for positions in range(1, 7):
            together: dict[int, float] = {}
            for entry in seen[:positions]:
                for key, value in entry[layer].items():
                    together[key] = max(value, together.get(key, 0.0))
            assert buffer.union(layer, positions) == together
        assert buffer.union(layer) == together


def test_refusals() -> None:
    with pytest.raises(ExpertcastError, match="layers=0, experts=4: give 1 or more of both"):
        LookaheadBuffer(0, 4)
    buffer = LookaheadBuffer(1, 4)
    with pytest.raises(ExpertcastError, match="position 1 comes before position 0: leave none out"):
        buffer.put(1, 0, [[0]], [[1.0]])


def test_what_the_slots_cannot_keep_comes_again() -> None:
    """Two layers of 8, 3 slots, which hold experts 0, 1 of layer 0 and 0 of layer 1 (keys 0, 1, 8).

    Position 0 needs 0 and 1 of layer 0, 0 and 2 of layer 1: four, one of them new; one of the three that are held has
    to go for it and comes again: 2 copies. Position 1 adds 3 and 4 of layer 0: six in all, three new, three too many,
    so that all three held ones come again: 2 new and 2 more than before. Without a limit: 1 and 2.
    """
    held = {0, 1, 8}
    for slots, growth in ((3, [2, 4]), (None, [1, 2])):
        buffer = LookaheadBuffer(2, 8, slots)
        buffer.put(0, 0, [[0, 1]], [[0.5, 0.5]])
        buffer.put(0, 1, [[0, 2]], [[0.5, 0.5]])
        assert buffer.new_experts(held) == 1
        buffer.put(1, 0, [[3, 4]], [[0.5, 0.5]])
        assert buffer.new_experts(held) == 3
        assert buffer.growth == growth
