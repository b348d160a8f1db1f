"""The device-side tables against a model of them in plain Python."""

from __future__ import annotations

import random

import pytest
import torch

from expertcast.runtime.experimental.kernel_link import COUNTS, DeviceResidency, Moves

LAYERS, EXPERTS = 3, 8


class _Model:
    """Least recently used, written with lists: `order` holds the keys, oldest use first."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.order: list[int] = []
        self.counts = [[0] * len(COUNTS) for _ in range(LAYERS)]
        self.unused: set[int] = set()

    def bring(self, layer: int, ids: list[int]) -> set[int]:
        keys = [layer * EXPERTS + expert for expert in dict.fromkeys(ids)]
        missing = [key for key in keys if key not in self.order]
        row = self.counts[layer]
        for name, count in (("requests", len(keys)), ("misses", len(missing)), ("chunks", 1)):
            row[COUNTS.index(name)] += count
        row[COUNTS.index("hits")] += len(keys) - len(missing)
        row[COUNTS.index("prefetched_used")] += len(self.unused.intersection(keys))
        self.unused.difference_update(keys)
        self._place(keys)
        return set(missing)

    def expect(self, layer: int, ids: list[int], running: int) -> set[int]:
        keys = [layer * EXPERTS + expert for expert in dict.fromkeys(ids)]
        hits = [key for key in keys if key in self.order]
        missing = [key for key in keys if key not in self.order][: max(0, self.slots - running - len(hits))]
        self.counts[layer][COUNTS.index("prefetched")] += len(missing)
        self._place([key for key in keys if key in hits or key in missing])
        self.unused.update(missing)
        return set(missing)

    def finish(self, layer: int, keep: bool) -> None:
        self.counts[layer][COUNTS.index("steps")] += 1
        if not keep:
            own = range(layer * EXPERTS, (layer + 1) * EXPERTS)
            self.order = [key for key in self.order if key not in own]
            self.unused.difference_update(own)

    def _place(self, keys: list[int]) -> None:
        self.order = [key for key in self.order if key not in keys] + keys
        lost = self.order[: max(0, len(self.order) - self.slots)]
        assert not set(lost) & set(keys)
        self.order = self.order[len(lost) :]
        self.unused.difference_update(lost)


def _moved(moves: Moves, held: dict[int, int]) -> set[int]:
    """Do the copies in a dict slot -> key; returns the keys that moved."""
    moved = [(slot, key) for key, slot, move in zip(*(t.tolist() for t in moves), strict=True) if move]
    assert len({slot for slot, _ in moved}) == len(moved)
    held.update(moved)
    return {key for _, key in moved}


@pytest.mark.parametrize("slots", [4, 6, 11, 24])
@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_same_hits_misses_and_victims_as_the_model(slots: int, tokens: int) -> None:
    order = random.Random(slots * 100 + tokens)
    tables = DeviceResidency(layers=LAYERS, experts=EXPERTS, slots=slots, device=torch.device("cpu"))
    model, held = _Model(slots), dict[int, int]()
    for step in range(60):
        layer, keep = step % LAYERS, order.random() < 0.8
        pool = order.sample(range(EXPERTS), min(slots, 4))  # so that 40 tokens name no more than fit
        ids = [order.choice(pool) for _ in range(2 * tokens)]
        ids_TK = torch.tensor(ids).view(tokens, 2)
        many = len(ids) > 64
        expected = sorted(set(ids)) if many else ids
        assert _moved(tables.bring(layer, ids_TK), held) == model.bring(layer, expected)
        if tables.width(ids_TK) <= slots:
            slots_of = tables.slots_for(layer, ids_TK).view(-1).tolist()
            assert [held[slot] for slot in slots_of] == [layer * EXPERTS + expert for expert in ids]
        if tokens == 1:
            forecast = order.sample(range(EXPERTS), 3)
            later = (layer + 1) % LAYERS
            moves = tables.expect(later, torch.tensor(forecast), running=2)
            assert _moved(moves, held) == model.expect(later, forecast, running=2)
            assert [held[slot] for slot in slots_of] == [layer * EXPERTS + expert for expert in ids]
        tables.finish(layer, keep=keep)
        model.finish(layer, keep)
    assert tables.counts.tolist() == model.counts
    resident = [key for key in range(LAYERS * EXPERTS) if tables.slot_of[key] >= 0]
    assert sorted(model.order) == resident
    for key in resident:
        assert held[int(tables.slot_of[key])] == key


def test_a_chunk_counts_its_own_experts_only() -> None:
    tables = DeviceResidency(layers=1, experts=EXPERTS, slots=4, device=torch.device("cpu"))
    ids_TK = torch.arange(EXPERTS).view(4, 2)
    within_E = torch.arange(EXPERTS) < 3
    moves = tables.bring(0, ids_TK, within_E)
    assert _moved(moves, {}) == {0, 1, 2}
    assert (tables.slots_for(0, ids_TK.view(-1)) >= 0).tolist() == within_E.tolist()


def test_clear_forgets_everything_but_the_counters() -> None:
    tables = DeviceResidency(layers=1, experts=EXPERTS, slots=4, device=torch.device("cpu"))
    ids_TK = torch.tensor([[1, 2]])
    tables.bring(0, ids_TK)
    assert not tables.bring(0, ids_TK).moved_N.any()
    tables.clear()
    assert tables.bring(0, ids_TK).moved_N.all()
    assert tables.counts[0, :3].tolist() == [6, 2, 4]
