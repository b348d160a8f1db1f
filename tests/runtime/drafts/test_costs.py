"""Costs and yield of drafts: cases worked out by hand, and independent implementations."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from expertcast.runtime.drafts.costs import Cycle, DraftModel, VerificationTimes, expected_tokens, exposed_seconds
from expertcast.runtime.recording.learning import Option, PositionMeans, RunningLine, RunningMean, Trials


@pytest.mark.parametrize("length", range(5))
def test_expected_tokens_are_the_mean_over_all_outcomes(length: int) -> None:
    acceptance = [0.9, 0.35, 0.6, 0.8, 0.1][:length]
    mean = 0.0
    for outcome in itertools.product((True, False), repeat=length):
        chance = 1.0
        for took, p in zip(outcome, acceptance, strict=True):
            chance *= p if took else 1 - p
        mean += chance * (1 + next((j for j, took in enumerate(outcome) if not took), length))
    assert expected_tokens(acceptance)[length] == pytest.approx(mean)


@pytest.mark.parametrize(("backlog_s", "verify_s"), [(0.0, 4.0), (2.0, 4.0), (4.0, 4.0), (6.0, 4.0), (20.0, 4.0)])
def test_exposed_seconds_are_what_a_walk_through_the_layers_waits(backlog_s: float, verify_s: float) -> None:
    layers, clock = 8, 0.0
    for layer in range(layers):
        clock = max(clock, backlog_s * (layer + 1) / layers) + verify_s / layers
    assert exposed_seconds(backlog_s, verify_s, layers) == pytest.approx(clock - verify_s)


def test_verification_is_interpolated_and_goes_on_with_the_last_slope() -> None:
    times = VerificationTimes()
    assert times.values(2) == [0.0, 0.0, 0.0]
    times.observe(3, 0.016)
    assert times.values(4) == pytest.approx([0.016] * 5)
    times.observe(1, 0.010)
    # 3 ms a token between 1 and 3, and beyond
    assert times.values(5) == pytest.approx([0.007, 0.010, 0.013, 0.016, 0.019, 0.022])
    times.observe(7, 0.018)
    # .5 ms a token from 3 to 7, and from there on
    assert times.values(9) == pytest.approx([0.007, 0.010, 0.013, 0.016, 0.0165, 0.017, 0.0175, 0.018, 0.0185, 0.019])


def test_more_tokens_are_never_cheaper_to_verify() -> None:
    times = VerificationTimes()
    for tokens, seconds in ((1, 0.010), (3, 0.016), (5, 0.012)):
        times.observe(tokens, seconds)
    assert times.values(6) == pytest.approx([0.007, 0.010, 0.013, 0.016, 0.016, 0.016, 0.016])


def test_a_verification_measured_long_ago_is_forgotten() -> None:
    times = VerificationTimes()
    times.observe(5, 0.5)  # at a bad moment
    for _ in range(2000):
        times.observe(1, 0.010)
        times.observe(3, 0.012)
    assert times.values(5)[5] == pytest.approx(0.014)


def test_a_cycle_by_hand() -> None:
    # 4 layers, copies of 1 ms, draft passes of 4 ms and then 2 ms, verification 10 ms + 1 ms per token
    verify = VerificationTimes()
    verify.observe(1, 0.011)
    verify.observe(3, 0.013)
    model = DraftModel(4)
    model.observe(
        Cycle(draft="int4", drafted=2, accepted=(1,), passes_s=(0.004, 0.002), verify_s=0.0165, waited_s=0.0035,
              growth=(6, 2)), verify.values(3), 0.001,
    )  # fmt: skip
    # The cycle itself: 6 copies in the first pass leave 2 ms of them; 2 more in the next: 2 ms are left again.
    # Verification of 13 ms hides all but the first layer's share, .5 ms: 6 + 13 + .5 = 19.5 of 22.5 ms. 3 ms remain
    # for experts that the draft did not predict.
    assert model.report(1)["rest_s"] == pytest.approx([0.003])
    # n = 0: 11. n = 1: 4 + 12 + 2/4. n = 2: 19.5; n = 3, with 30 new ones: 30 ms are left, of which 14 * 3/4 hide
    assert model.seconds(3, verify.values(4), 0.001, (6, 2, 30)) == pytest.approx(
        [0.014, 0.0195, 0.0225, 0.008 + 0.014 + 0.0225]
    )
    # unforeseen positions bring what the last one did: 0 of them are drafted, the first brings 6, the others 2
    assert model.report(3)["growth"] == pytest.approx([6 / 1.2, (2 + 0.2 * 5) / 1.2, 2.5])


def test_acceptance_by_hand() -> None:
    model, verify = DraftModel(4), [0.0] * 6
    model.observe(Cycle(draft="a", drafted=3, accepted=(3, 1)), verify, 0.0)
    # position 0: both of 2; position 1: 1 of 2; position 2: 1 of 1; each drawn to the one before by 2, from .8
    first = (2 + 2 * 0.8) / 4
    second = (1 + 2 * first) / 4
    third = (1 + 2 * second) / 3
    assert model.report(4)["acceptance"] == pytest.approx([first, second, third, third])


def test_what_was_certain_before_is_not_judged() -> None:
    verify = [0.0] * 6
    one = DraftModel(4)
    # the first two positions of the second sequence were text already: its judged ones are 2 (kept) and 3 (refused)
    one.observe(Cycle(draft="a", drafted=4, accepted=(0, 3), known=(0, 2)), verify, 0.0)
    first = (0 + 2 * 0.8) / 3
    assert one.report(4)["acceptance"] == pytest.approx([first, first, (1 + 2 * first) / 3, 2 * (1 + 2 * first) / 9])


def test_positions_that_are_not_reached_fall_back_to_the_one_before() -> None:
    means = PositionMeans(0.8, keep=0.9, firmness=2.0)
    for _ in range(50):
        means.start_cycle()
        means.observe(0, 1.0)
        means.observe(1, 0.0)
    high, low = means.values(2)
    assert high > 0.9 > 0.2 > low
    for _ in range(100):
        means.start_cycle()
        means.observe(0, 1.0)
    assert means.values(2)[1] == pytest.approx(means.values(2)[0], abs=0.01)


def test_a_running_mean_leaves_its_first_observation_behind() -> None:
    mean = RunningMean(0.5)
    assert mean.value is None
    mean.observe(10.0)
    assert mean.value == pytest.approx(10.0)
    mean.observe(1.0)
    assert mean.value == pytest.approx((0.1 * 10 + 1) / 1.1)  # .2 of an observation, halved
    mean.observe(3.0)
    assert mean.value == pytest.approx((0.05 * 10 + 0.5 * 1 + 3) / 1.55)


def test_a_disturbance_counts_as_three_times_the_mean_and_a_change_is_found_out() -> None:
    mean = RunningMean(0.5)
    for value in (1.0, 1.0, 100.0):
        mean.observe(value)
    assert mean.value == pytest.approx((0.05 + 0.5 + 3) / 1.55)
    for _ in range(20):
        mean.observe(100.0)
    assert mean.value == pytest.approx(100.0, rel=0.01)


@pytest.mark.parametrize("seed", range(3))
def test_a_running_line_is_the_weighted_least_squares_line(seed: int) -> None:
    choose, keep = random.Random(seed), 0.9
    points = [(float(choose.randrange(1, 9)), choose.random()) for _ in range(30)]
    line = RunningLine(keep, ridge=0.0)
    for x, y in points:
        line.observe(x, y)
    weights = np.sqrt(keep ** np.arange(29, -1, -1))
    rows = np.array([[1.0, x] for x, _ in points])
    base, slope = np.linalg.lstsq(rows * weights[:, None], np.array([y for _, y in points]) * weights, rcond=None)[0]
    assert line.at([0.0, 3.0, 12.0]) == pytest.approx([base, base + 3 * slope, base + 12 * slope])


def test_a_running_line_is_flat_where_x_never_changed() -> None:
    line = RunningLine(0.9, ridge=4.0)
    assert line.at([1.0]) == [0.0]
    for y in (1.0, 1.0, 1.0):
        line.observe(2.0, y)
    assert line.at([0.0, 9.0]) == pytest.approx([1.0, 1.0])


# What is tried again, and when


@dataclass(frozen=True, slots=True, kw_only=True)
class Named(Option):
    """An option of this name."""

    of: str

    @property
    def name(self) -> str:
        return self.of


BEST = Named(of="best", tokens=1.0, seconds=0.010)


def candidate(seconds: float, loss_s: float, *, hopeful: bool, of: str = "a") -> Named:
    """A cycle that loses so much against the best; if hopeful, it may be better within what was measured."""
    return Named(of=of, tokens=(seconds - loss_s) * BEST.rate, seconds=seconds, doubt=1.0 if hopeful else 0.0)


def cycles_tried(
    trials: Trials, count: int, seconds: float, loss_s: float, gain: Callable[[int], float] = lambda _cycle: 1.0
) -> list[int]:
    """Run `count` cycles, of the best or of the trial that is due; return those that were trials."""
    tried = []
    for cycle in range(count):
        if trials.next(BEST, {"a": candidate(seconds, loss_s, hopeful=False)}) is None:
            trials.spent(BEST.seconds)
            continue
        tried.append(cycle)
        trials.spent(seconds)
        trials.tried("a", gain(cycle), loss_s)
    return tried


def test_a_dear_trial_waits_until_the_run_can_afford_it() -> None:
    # cycles of 10 ms; a trial takes 20 ms, of which 8.9 are lost: 8.9 <= .0075 * (10 c + 20) from c = 117 on
    trials = Trials()
    # then 17.8 are lost: at cycle c all have taken 10 c + 10, so 17.8 <= .0075 * (10 c + 30) from c = 235 on
    assert cycles_tried(trials, 260, 0.020, 0.0089) == [117, 235]
    assert trials.lost_s <= 0.0075 * trials.seconds


def test_a_cheap_trial_pauses_longer_each_time_it_finds_nothing() -> None:
    tried = cycles_tried(Trials(), 100, 0.010, 0.0, lambda cycle: 2.0 if cycle > 60 else 1.0)
    # 8; the pause of 16 begins when that trial is over, at 9; then 32, from 26: 58; then 64, beyond the end
    assert tried == [8, 25, 58]


def test_what_may_be_better_than_the_best_is_tried_at_once_but_within_the_same_means() -> None:
    trials = Trials()
    for _ in range(5):
        trials.spent(0.010)
    assert (
        trials.next(BEST, {"a": candidate(0.0015, 0.0001, hopeful=False), "b": candidate(0.0015, 0.0002, hopeful=True)})
        == "b"
    ), "a has its pause before it"
    trials.lost_s += 0.0004
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
    trials.lost_s += 1.0  # more than it will ever have
    assert trials.next(BEST, {"b": candidate(0.010, 0.0010, hopeful=True)}) == "b", "a tenth of its own seconds"
    assert trials.next(BEST, {"b": candidate(0.010, 0.0011, hopeful=True)}) is None
    assert trials.next(BEST, {"b": candidate(0.010, 0.0001, hopeful=False)}) is None, (
        "it is known well, and a little worse"
    )
    assert trials.next(BEST, {"b": candidate(0.010, 0.0001, hopeful=True, of=BEST.name)}) is None, (
        "the best itself, only longer"
    )


def test_the_best_begins_its_pauses_anew() -> None:
    trials = Trials()
    for name in ("a", "a", "a"):
        trials.tried(name, 1.0, 0.0)  # its pause is 64 by now
    trials.won("a")
    assert cycles_tried(trials, 20, 0.010, 0.0) == [8]
