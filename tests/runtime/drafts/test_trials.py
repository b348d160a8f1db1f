"""What trials may cost, when they are due, and what luck does not decide."""

from __future__ import annotations

import pytest

from expertcast.runtime.drafts.costs import Choice, Cycle
from expertcast.runtime.drafts.governor import Governor, Trials

BEST = Choice(draft="best", length=1, tokens=1.0, seconds=0.010)


def candidate(seconds: float, loss_s: float, *, hopeful: bool, draft: str = "a") -> Choice:
    """A cycle that loses so much against the best; if hopeful, it may be better within what was measured."""
    return Choice(draft=draft, tokens=(seconds - loss_s) * BEST.rate, seconds=seconds, doubt=1.0 if hopeful else 0.0)


def test_a_dear_trial_waits_until_the_run_can_afford_it() -> None:
    # cycles of 10 ms; a trial takes 20 ms, of which 8.9 are lost: 8.9 <= .0075 * (10 c + 20) from c = 117 on
    trials, tried = Trials(), []
    for cycle in range(260):
        if trials.next(BEST, {"a": candidate(0.020, 0.0089, hopeful=False)}) is not None:
            tried.append(cycle)
            trials.spent(0.020)
            trials.lost(0.0089)
            trials.tried("a", 1.0)
        else:
            trials.spent(0.010)
    # then 17.8 are lost: at cycle c all have taken 10 c + 10, so 17.8 <= .0075 * (10 c + 30) from c = 235 on
    assert tried == [117, 235]
    assert trials.lost_s <= 0.0075 * trials.seconds


def test_a_cheap_trial_pauses_longer_each_time_it_finds_nothing() -> None:
    trials, tried = Trials(), []
    for cycle in range(100):
        if trials.next(BEST, {"a": candidate(0.010, 0.0, hopeful=False)}) is not None:
            tried.append(cycle)
            trials.spent(0.010)
            trials.tried("a", 2.0 if cycle > 60 else 1.0)
        else:
            trials.spent(0.010)
    # 8; the pause of 16 begins when that trial is over, at 9; then 32, from 26: 58; then 64, beyond the end
    assert tried == [8, 25, 58]


def test_one_that_turned_out_better_is_tried_again_soon() -> None:
    trials, tried = Trials(), []
    for cycle in range(40):
        if trials.next(BEST, {"a": candidate(0.010, 0.0, hopeful=False)}) is not None:
            tried.append(cycle)
            trials.tried("a", 1.1)
        trials.spent(0.010)
    assert tried == [8, 16, 24, 32]


def test_what_may_be_better_than_the_best_is_tried_at_once_but_within_the_same_means() -> None:
    trials = Trials()
    for _ in range(5):
        trials.spent(0.010)
    assert (
        trials.next(BEST, {"a": candidate(0.0015, 0.0001, hopeful=False), "b": candidate(0.0015, 0.0002, hopeful=True)})
        == "b"
    ), "a has its pause before it"
    trials.lost(0.0004)
    assert trials.next(BEST, {"b": candidate(0.0015, 0.0002, hopeful=True)}) is None, (
        ".6 ms are more than .0075 of 51.5"
    )
    assert trials.next(BEST, {"b": candidate(0.003, -0.0002, hopeful=True)}) == "b", (
        "one that is expected to gain costs nothing"
    )
    trials.spent(1.0)
    assert trials.next(BEST, {"b": candidate(0.0015, 0.0002, hopeful=True)}) == "b"


def test_what_is_as_good_as_the_best_for_all_that_is_known_needs_no_means() -> None:
    trials = Trials()
    for _ in range(20):
        trials.spent(0.010)
    trials.lost(1.0)  # more than it will ever have
    assert trials.next(BEST, {"b": candidate(0.010, 0.0010, hopeful=True)}) == "b", "a tenth of its own seconds"
    assert trials.next(BEST, {"b": candidate(0.010, 0.0011, hopeful=True)}) is None
    assert trials.next(BEST, {"b": candidate(0.010, 0.0001, hopeful=False)}) is None, (
        "it is known well, and a little worse"
    )
    assert trials.next(BEST, {"b": candidate(0.010, 0.0001, hopeful=True, draft=BEST.draft)}) is None, (
        "the best itself, only longer"
    )


def test_the_best_begins_its_pauses_anew() -> None:
    trials = Trials()
    for name in ("a", "a", "a"):
        trials.tried(name, 1.0)  # its pause is 64 by now
    trials.won("a")
    tried = []
    for cycle in range(20):
        if trials.next(BEST, {"a": candidate(0.01, 0.0, hopeful=False)}):
            tried.append(cycle)
            trials.tried("a", 1.0)
        trials.spent(0.01)
    assert tried == [8]


def test_a_choice_says_what_does_not_rest_on_luck() -> None:
    # passes of 1 ms, verification of 10 ms whatever is verified, all of 2 accepted twice; the older counts .985
    governor = Governor(4, 0.0, longest=2)
    for _ in range(3):
        governor.observe(Cycle(draft=None, verify_s=0.010))
    for _ in range(2):
        governor.observe(Cycle(draft="a", drafted=2, accepted=(2,), passes_s=(1e-3, 1e-3), verify_s=0.010, emitted=3.0))
    choice = governor.choose(["a"])
    first = (1.985 + 2 * 0.8) / 3.985
    second = (1.985 + 2 * first) / 3.985
    assert choice.rate == pytest.approx((1 + first + first * second) / 0.012)
    lower = first - (first * (1 - first) / 3.985) ** 0.5
    last = second - (second * (1 - second) / 3.985) ** 0.5
    assert choice.rate_within(-1.0) == pytest.approx((1 + lower + lower * last) / 0.012)
    assert choice.rate_within(0.5) - choice.rate == pytest.approx((choice.rate - choice.rate_within(-1.0)) / 2)
    assert str(choice) == "a, 2 ahead: 2.8 tokens in 12 ms (229/s)"
