"""Thresholds by hand."""

from __future__ import annotations

import pytest
import torch

from expertcast.predictors import ExpertcastError
from expertcast.runtime.policies.base import CacheShape
from expertcast.runtime.policies.prefetch import PREFETCH, PrefetchPolicy
from tests.runtime.policies.prefetch.made import of_probabilities, transfer, wanted


def _made(text: str, top_k: int = 2) -> PrefetchPolicy:
    return PREFETCH.choose(text).make(CacheShape(layers=4, experts=4, top_k=top_k, slots=8))


def test_softmax() -> None:
    """Over .2: experts 0 and 2 for the first token, 3 and 0 for the second. Sums: .75, .25, .75 -> 0 before 2."""
    rows = [[0.45, 0.15, 0.25, 0.15], [0.25, 0.05, 0.2, 0.5]]
    policy = _made("threshold:of=softmax,above=0.2")
    assert policy.experts(of_probabilities(rows[:1], 2), transfer()) == [0, 2]
    assert policy.experts(of_probabilities(rows, 2), transfer()) == [0, 3, 2]
    assert _made("threshold:of=softmax,above=0.6").experts(of_probabilities(rows, 2), transfer()) == []


def test_use() -> None:
    """Margins 2.5, .5, -.5, -2.5: probabilities .92, .62, .38, .08 at the start."""
    forecast = wanted(torch.tensor([[3.0, 1.0, 0.0, -2.0]]), 2)
    assert _made("threshold").experts(forecast, transfer()) == [0, 1]
    assert _made("threshold:above=0.3").experts(forecast, transfer()) == [0, 1, 2]
    assert _made("threshold:above=0.9").experts(forecast, transfer()) == [0]


def test_learns() -> None:
    """Forecasts that are right every time: what lies beyond the boundary is soon unlikely, what lies within likely."""
    policy = _made("threshold:above=0.07")
    forecast = wanted(torch.tensor([[3.0, 1.0, 0.0, -2.0]]), 2)
    assert policy.experts(forecast, transfer()) == [0, 1, 2, 3]
    for _ in range(500):
        policy.see_routing(1, [0, 1])
        chosen = policy.experts(forecast, transfer())
    assert chosen == [0, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("threshold:above=1", "above=1.0: give a probability, 0 or more and under 1"),
        ("threshold:above=-0.1", "above=-0.1: give a probability, 0 or more and under 1"),
        ("threshold:of=logits", "unknown of='logits': choose from use, softmax"),
    ],
)
def test_bad_values(text: str, message: str) -> None:
    with pytest.raises(ExpertcastError) as caught:
        PREFETCH.choose(text)
    assert message in str(caught.value)
