"""What a copy is worth: by hand, and outcome by outcome."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expertcast.predictors import ExpertcastError
from expertcast.runtime.policies.base import CacheShape
from expertcast.runtime.policies.prefetch import PREFETCH, Transfer, Value, saved_s
from tests.runtime.policies.prefetch.made import transfer, wanted

P = [0.9, 0.6, 0.3, 0.1]
LOGITS = torch.tensor([[math.log(p / (1 - p)) for p in P]])
"""K = 2: the boundary lies at (log-odds .6 + log-odds .3) / 2 = (.405 - .847) / 2 = -.221, so the probabilities at the
start are those of log-odds higher by .221: .918, .652, .348, .122."""


def _made(text: str = "value") -> Value:
    policy = PREFETCH.choose(text).make(CacheShape(layers=4, experts=4, top_k=2, slots=8))
    assert isinstance(policy, Value)
    return policy


def _chosen(given: Transfer, text: str = "value") -> list[int]:
    return _made(text).experts(wanted(LOGITS, 2), given)


def test_free_slots_and_time_take_all() -> None:
    assert _chosen(transfer(free=4)) == [0, 1, 2, 3]
    assert _chosen(transfer(free=4), "value:least=0.2") == [0, 1, 2]


def test_a_victim_that_a_miss_would_evict_too() -> None:
    """Charged for a wrong copy: .082 * .95 = .078 < .918; .348 * .95 = .331 < .652; .652 * .95 = .619 > .348. The first
    `free` cost nothing."""
    assert _chosen(transfer(worth=0.95)) == [0, 1]
    assert _chosen(transfer(worth=0.95, free=3)) == [0, 1, 2]
    assert _chosen(transfer(worth=0.5)) == [0, 1, 2]


def test_nothing_that_is_worth_less_than_its_victim() -> None:
    """Charged for every copy: .918, .652, .348, .122 against the victim's probability."""
    always = "value:eviction=always"
    assert _chosen(transfer(worth=0.7), always) == [0]
    assert _chosen(transfer(worth=0.4), always) == [0, 1]
    assert _chosen(transfer(worth=0.95), always) == []
    assert _chosen(transfer(worth=0.95, free=1), always) == [0]
    assert _chosen(transfer(worth=0.4, free=3), always) == [0, 1, 2]


def test_only_what_arrives_in_time() -> None:
    """Copies of 1 s. 2 s are left: two arrive, the third could not even begin. With a backlog of 1 s: one."""
    assert _chosen(transfer(free=4, left_s=2.0)) == [0, 1]
    assert _chosen(transfer(free=4, left_s=2.0, backlog_s=1.0)) == [0]
    assert _chosen(transfer(free=4, left_s=2.0, backlog_s=2.0)) == []


def test_a_copy_that_is_late() -> None:
    """.4 s of the first copy's 1 s come too late: .918 * .6 = .551 saved, .082 * .4 = .033 lost: .518 for a victim.

    For .05 s of the copy's time: .918 * .05 = .0459 saved, .082 * .95 = .0779 lost.
    """
    assert _chosen(transfer(left_s=0.6, worth=0.51), "value:eviction=always") == [0]
    assert _chosen(transfer(left_s=0.6, worth=0.53), "value:eviction=always") == []
    assert _chosen(transfer(left_s=0.05, free=4)) == []


@pytest.mark.parametrize("worth", [0.0, 0.1])
def test_a_slow_link_turns_it_off(worth: float) -> None:
    """Copies that take a hundred times what is left."""
    assert _chosen(transfer(copy_s=100.0, left_s=1.0, free=4, worth=worth)) == []


def test_its_own_that_are_resident_are_named() -> None:
    """0 and 1 are the forecast's own. 1 is protected whatever the link does; 2, which is resident too, is not."""
    assert _chosen(transfer(left_s=0.0, resident=(1, 2))) == [1]
    assert _chosen(transfer(free=4, resident=(1, 2))) == [0, 1, 3]


def test_parts_in_memory() -> None:
    """1 s is left. Reading 0 or 2 takes 100 s and is not worth it; decoding 1 or 3 takes .4 s."""
    given = replace(transfer(left_s=1.0, free=4), seconds_of=lambda expert: 0.4 if expert in (1, 3) else 100.0)
    assert _chosen(given) == [1, 3]
    assert _chosen(replace(given, seconds_of=lambda _expert: 100.0)) == []


def test_learns_what_forecasts_are_worth() -> None:
    """Against a victim of .5: the second expert (.652) is loaded until it turns out to be needed hardly ever."""
    policy = _made("value:eviction=always")
    forecast, given = wanted(LOGITS, 2), transfer(worth=0.5)
    assert policy.experts(forecast, given) == [0, 1]
    for _ in range(100):
        policy.see_routing(1, [0])
        chosen = policy.experts(forecast, given)
    assert chosen == [0]


@given(p=st.floats(0.0, 1.0), left=st.floats(0.0, 3.0), backlog=st.floats(0.0, 2.0), copy_s=st.floats(0.1, 2.0))
def test_against_both_outcomes(p: float, left: float, backlog: float, copy_s: float) -> None:
    """Used, the layer waits for what is left of the copy instead of a whole one; not used, whoever misses next does.
    A copy that has not begun when the layer asks is dropped, or begins as a miss would."""
    finish = backlog + copy_s
    waited_if_used = min(copy_s, max(0.0, finish - left))
    waited_if_not = 0.0 if backlog >= left else max(0.0, finish - left)
    expected = p * (copy_s - waited_if_used) - (1 - p) * waited_if_not
    assert saved_s(p, backlog, copy_s, left) == pytest.approx(expected, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 1000),
    left=st.floats(0.0, 5.0),
    backlog=st.floats(0.0, 2.0),
    worth=st.floats(0.0, 1.0),
    free=st.integers(0, 3),
)
def test_stopping_early_leaves_nothing_out(seed: int, left: float, backlog: float, worth: float, free: int) -> None:
    """No expert after the first that is not worth its copy would be worth it in its place."""
    logits_1E = torch.randn(1, 12, generator=torch.Generator().manual_seed(seed))
    policy = PREFETCH.choose("value:eviction=always").make(CacheShape(layers=4, experts=12, top_k=3, slots=8))
    given = transfer(left_s=left, backlog_s=backlog, worth=worth, free=free)
    chosen = policy.experts(wanted(logits_1E, 3), given)
    ranked = logits_1E[0].sort(descending=True)
    assert chosen == ranked.indices[: len(chosen)].tolist()
    margin_E = ranked.values - ranked.values[2:4].mean()
    p = [value for value in margin_E.double().sigmoid().tolist() if value >= 0.02][len(chosen) :]
    for value in p:
        assert saved_s(value, backlog + len(chosen), given.copy_s, left) <= worth * (len(chosen) >= free) + 1e-6


def test_bad_values() -> None:
    with pytest.raises(ExpertcastError, match=r"unknown eviction='never': choose from wrong, always"):
        PREFETCH.choose("value:eviction=never")
    with pytest.raises(ExpertcastError, match=r"least=0.0: give a probability between 0 and 1"):
        PREFETCH.choose("value:least=0")
    with pytest.raises(ExpertcastError, match=r"choose from none, top_k, percentile, threshold, value"):
        PREFETCH.choose("values")
