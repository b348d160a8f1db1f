"""How many slots should be free: equations 14 to 17 by hand, and against them word by word."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertcast.predictors import ExpertcastError
from expertcast.runtime.policies.base import CacheShape
from expertcast.runtime.policies.eviction import PRE_EVICTION, PreEviction

P = [0.40, 0.25, 0.10, 0.095, 0.05, 0.045, 0.035, 0.025]
"""Gaps after the 1st, 2nd ...: .15 .15 .005 .045 .005 .01 .01"""


def _made(text: str) -> PreEviction:
    return PRE_EVICTION.choose(text).make(CacheShape(layers=4, experts=8, top_k=2, slots=8))


@pytest.mark.parametrize(
    ("text", "k", "resident", "target"),
    [
        ("gap", 2, 0, 2),  # the gap after the 2nd is wide
        ("gap", 2, 2, 0),
        ("gap", 3, 1, 3),  # .005 is a tie, .045 is none: 2 + 1
        ("gap:literal=true", 3, 1, 3),  # .005 and .045: one tie among two
        ("gap:r_max=3", 3, 1, 3),  # stops at .045
        ("gap:r_max=3,literal=true", 3, 1, 4),  # .005, .045, .005: two ties
        ("gap:r_max=0", 3, 1, 2),
        ("gap:tau=0.1", 3, 3, 2),  # .005 and .045
        ("gap", 4, 4, 0),  # .045 first
        ("gap:literal=true", 4, 4, 1),  # .045, then .005
        ("gap", 7, 7, 1),  # one gap is left after the 7th of 8
        ("gap", 8, 5, 3),  # none
        ("none", 3, 0, 0),
    ],
)
def test_by_hand(text: str, k: int, resident: int, target: int) -> None:
    shuffled = [P[expert] for expert in (3, 0, 7, 2, 5, 1, 6, 4)]
    assert _made(text).release_target(shuffled, set(range(k)), resident) == target


@given(
    values=st.lists(st.floats(0.0, 1.0), min_size=2, max_size=12),
    tau=st.floats(0.0, 0.5),
    r_max=st.integers(0, 5),
    literal=st.booleans(),
    data=st.data(),
)
def test_against_the_equations(values: list[float], tau: float, r_max: int, literal: bool, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(values)))
    resident = data.draw(st.integers(0, k))
    p = dict(enumerate(sorted(values, reverse=True), start=1))
    ties = [p[k + j] - p[k + j + 1] < tau for j in range(r_max) if k + j + 1 in p]
    redundancy = sum(ties) if literal else (ties.index(False) if False in ties else len(ties))
    policy = _made(f"gap:tau={tau},r_max={r_max},literal={str(literal).lower()}")
    assert policy.release_target(values, range(k), resident) == k - resident + redundancy


def test_only_gap_is_active() -> None:
    assert {name: _made(name).active for name in PRE_EVICTION.names()} == {"none": False, "gap": True}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gap:tau=2", "tau=2.0: give a difference of probabilities, from 0 to 1"),
        ("gap:r_max=-1", "r_max=-1: give 0 or more slots"),
        ("gap:rmax=1", "its options are tau, r_max, literal"),
        ("early", "unknown pre-eviction policy 'early': choose from none, gap"),
    ],
)
def test_bad_values(text: str, message: str) -> None:
    with pytest.raises(ExpertcastError) as caught:
        PRE_EVICTION.choose(text)
    assert message in str(caught.value)
