"""How many experts an overfetch factor stands for: one rule in runtime, simulator and evaluation (row A20)."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import pytest
import torch

from expertcast.predictors.view import ModelShape, overfetched
from expertcast.runtime.policies import PREFETCH
from expertcast.runtime.policies.base import CacheShape
from expertcast.training.metrics import BUDGETS, budget
from tests.runtime.policies.prefetch.made import wanted

EXPERTS = 32


@pytest.mark.parametrize(
    ("factor", "top_k"), [("1.1", 4), ("1.5", 3), ("1.5", 5), ("1.2", 6), ("2.0", 4), ("1.12", 25)]
)
def test_runtime_and_evaluation_round_up(factor: str, top_k: int) -> None:
    """The paper's ceil(f k), by exact arithmetic; `round` would give 4, 4, 8, 7 for the first four."""
    expected = min(EXPERTS, ceil(Fraction(factor) * top_k))
    policy = PREFETCH.choose(f"top_k:overfetch={factor}").make(
        CacheShape(layers=2, experts=EXPERTS, top_k=top_k, slots=64)
    )
    one = wanted(torch.arange(EXPERTS).flip(0)[None].float(), top_k)
    assert len(policy.experts(one, None)) == expected
    on_device = policy.device_ids(one.forecast)
    assert on_device is not None
    assert len(on_device.unique()) == expected
    shape = ModelShape(layers=2, experts=EXPERTS, top_k=top_k, hidden=4)
    assert budget(float(factor), shape) == expected
    assert overfetched(float(factor), top_k, EXPERTS) == expected


@pytest.mark.parametrize("factor", BUDGETS.values())
def test_never_more_than_there_are(factor: float) -> None:
    shape = ModelShape(layers=2, experts=8, top_k=6, hidden=4)
    assert budget(factor, shape) == min(8, ceil(factor * 6))
