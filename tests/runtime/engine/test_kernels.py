"""Answers to `grouped_mm` over slots: the same products as torch's own, however the groups are told apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from expertcast.runtime.engine import kernels
from expertcast.runtime.engine.kernels import _ExpertOrder, _SlotRanges


def _groups(slots: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sorted slot ids, their rows, weights [S, D, F], and offsets as transformers' kernel computes them."""
    generator = torch.Generator().manual_seed(rows)
    slots_P = torch.randint(0, slots, (rows,), generator=generator).sort(stable=True).values
    hidden_PD = torch.randn(rows, 32, generator=generator).bfloat16()
    weight_SDF = torch.randn(slots, 16, 32, generator=generator).bfloat16().transpose(1, 2)
    offsets = torch.bincount(slots_P, minlength=slots).cumsum(0).int()
    return slots_P, hidden_PD, weight_SDF, offsets


@pytest.mark.parametrize("rows", [1, 8, 100])
@pytest.mark.parametrize("native", [True, False])
def test_ranges_of_groups(rows: int, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots in several calls of at most 7 groups each, some calls empty, against one call over all 40."""
    monkeypatch.setattr(kernels, "_MOST_GROUPS", 7)
    slots_P, hidden_PD, weight_SDF, offsets = _groups(40, rows)
    expected = functional.grouped_mm(hidden_PD, weight_SDF, offs=offsets)
    shuffled = slots_P[torch.randperm(rows)].tolist()
    seen: list[int] = []

    def counting(rows_PD: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        seen.append(len(weight))
        return functional.grouped_mm(rows_PD, weight, offs=offs)

    ranges = _SlotRanges(shuffled, native)
    with ranges:
        got = functional.grouped_mm(hidden_PD, weight_SDF, offs=offsets)
    assert torch.equal(got, expected)
    monkeypatch.setattr(kernels, "_GROUPED_MM", (counting,))
    again = ranges.__torch_function__(counting, (), (hidden_PD, weight_SDF), {"offs": offsets})
    assert torch.equal(again, expected)
    assert len(seen) == (len({slot // 7 for slot in shuffled}) if native else 0)
    assert all(groups <= 7 for groups in seen)


def test_rows_in_the_experts_order() -> None:
    """Slots in another order than their experts: rows come as the experts' sort has them."""
    ids_P = torch.tensor([5, 2, 5, 9, 2, 2])
    slot_of = torch.tensor([0, 0, 30, 0, 0, 4, 0, 0, 0, 11])
    weight_SDF = torch.randn(40, 8, 6)
    hidden_PD = torch.randn(6, 8)
    order_P = torch.sort(ids_P).indices
    with _ExpertOrder(slot_of[ids_P], order_P):
        sorted_slots, perm = torch.sort(slot_of[ids_P])
        got = functional.grouped_mm(hidden_PD[perm], weight_SDF, offs=torch.zeros(40, dtype=torch.int32))
    assert torch.equal(perm, order_P)
    assert sorted_slots.tolist() == [30, 30, 30, 4, 4, 11]
    for row, pair in enumerate(perm.tolist()):
        torch.testing.assert_close(got[row], hidden_PD[pair] @ weight_SDF[slot_of[ids_P[pair]]])
