"""The governor against exhaustive replays of made worlds, whose verification is walked layer by layer."""

from __future__ import annotations

import json
import statistics

import pytest

from expertcast.predictors import ExpertcastError
from expertcast.runtime import offload
from expertcast.runtime.drafts.costs import Choice, Cycle
from expertcast.runtime.drafts.governor import DraftCount, Governor, Tally, Trials
from expertcast.runtime.drafts.names import check_draft
from expertcast.runtime.drafts.prefetch import LookaheadBuffer
from tests.runtime.drafts.loops import SLOTS, cycles_of, prompt, tiny
from tests.runtime.drafts.world import Draft, Run, World, changed, random_world

MS = 1e-3
COMPUTE = World(
    drafts={"int4": Draft(acceptance=(0.85, 0.7, 0.5, 0.3), pass_s=3 * MS)},
    plain_s=20 * MS, verify_s=15 * MS, token_s=1 * MS,
)  # fmt: skip
"""Computing is what costs: two tokens ahead are best."""
COPIES = World(
    drafts={"int4": Draft(acceptance=(0.95, 0.95, 0.9, 0.9, 0.85, 0.4, 0.2), pass_s=3 * MS,
                          growth=(5, 2, 2, 1, 1), missed=0.3)},
    plain_s=30 * MS, verify_s=20 * MS, token_s=1 * MS,
)  # fmt: skip
"""Copies hide behind drafting, some experts were not foreseen: five tokens ahead are best."""
HOPELESS = World(
    drafts={"int4": Draft(acceptance=(0.4,), pass_s=13 * MS, growth=(6, 4, 3)), "drop": Draft((0.2,), 6 * MS)},
    plain_s=20 * MS, verify_s=15 * MS, token_s=2 * MS,
)  # fmt: skip
"""Plain steps give 50 tokens a second; int4 at best 1.4 tokens in 32 ms or a little more, drop 1.2 in 25."""


@pytest.mark.parametrize("seed", range(12))
def test_the_length_is_the_argmax_of_what_was_learnt(seed: int) -> None:
    # all parts are in the report; E[N] and T are put together here as a product of shares and a walk through layers
    world = random_world(seed)
    run = Run(world, Governor(world.layers, world.copy_s, longest=8, limit_s=None), seed)
    for _ in range(60):
        run.cycle()
    while (choice := run.governor.choose(list(world.drafts))).trial:
        run.cycle()
    found = run.governor.report()
    rates = {(None, 0): 1 / found["plain_s"]}
    for name, own in found["drafts"].items():
        for n in range(1, len(own["growth"]) + 1):
            kept, tokens = 1.0, 1.0
            for position in range(n):
                kept *= own["acceptance"][position]
                tokens += kept
            passes = [own["draft_s"][i] - (own["draft_s"][i - 1] if i else 0.0) for i in range(n)]
            left_s = 0.0
            for new, pass_s in zip(own["growth"], passes, strict=False):
                left_s = max(0.0, left_s + new * world.copy_s - pass_s)
            clock, compute_s = 0.0, found["verify_s"][n]
            for layer in range(world.layers):
                clock = max(clock, left_s * (layer + 1) / world.layers) + compute_s / world.layers
            rates[name, n] = tokens / (sum(passes) + clock + own["rest_s"][n - 1])
    within = {key: rate for key, rate in rates.items() if key[1] <= max(1, choice.longest)}
    own = {key: rate for key, rate in within.items() if key[0] == choice.draft}
    assert (choice.draft, choice.length) == max(own, key=own.__getitem__)
    assert choice.rate == pytest.approx(max(own.values()))
    assert choice.rate > 0.95 * max(within.values()), "another draft is not taken for a lead that may be luck"


@pytest.mark.parametrize("world", [COMPUTE, COPIES], ids=["compute", "copies"])
def test_nine_lengths_in_ten_are_those_of_an_exhaustive_replay(world: World) -> None:
    agreed, cycles = 0, 0
    for seed in range(4):
        run = Run(world, Governor(world.layers, world.copy_s, longest=8), seed)
        for _ in range(400):
            run.cycle()
        # trials are not what it thinks best, and the first cycles are what it learns from
        judged = [i for i in range(50, 400) if not run.trials[i]]
        agreed += sum(run.best[i] == run.chosen[i] for i in judged)
        cycles += len(judged)
        assert run.tokens / run.seconds > 0.96 * run.rate, "with all that trials and the first cycles cost"
    assert agreed >= 0.9 * cycles


@pytest.mark.parametrize("seed", range(4))
def test_predicted_seconds_are_within_a_tenth_in_the_median(seed: int) -> None:
    world = random_world(seed)
    run = Run(world, Governor(world.layers, world.copy_s, longest=8), seed)
    for _ in range(300):
        run.cycle()
    found = run.governor.report()
    assert found["within_tenth"] > 0.5
    assert 0.95 < found["predicted_over_actual"] < 1.05


def test_it_recovers_when_the_text_or_the_machine_changes() -> None:
    run = Run(COPIES, Governor(12, COPIES.copy_s, longest=8), 1)
    for _ in range(300):
        run.cycle()
    assert statistics.median(n for _, n in run.chosen[-50:]) == 5
    # half of the first tokens are refused, and what was refused once is refused again: one ahead is best
    run.change(changed(COPIES, "int4", acceptance=(0.5, 0.1)))
    for _ in range(200):
        run.cycle()
    assert run.best[-1] == ("int4", 1)
    assert statistics.median(n for _, n in run.chosen[-50:]) == 1
    run.change(COPIES)
    for _ in range(300):
        run.cycle()
    assert statistics.median(n for _, n in run.chosen[-50:]) == 5


def test_plain_steps_are_taken_where_no_draft_pays_and_trials_stay_cheap() -> None:
    run = Run(HOPELESS, Governor(12, HOPELESS.copy_s, longest=8), 0)
    for _ in range(1000):
        run.cycle()
    assert {best for best, _ in run.best} == {None}
    assert all(name is None for (name, _), trial in zip(run.chosen[150:], run.trials[150:], strict=True) if not trial)
    assert run.tokens / run.seconds > 0.98 / HOPELESS.plain_s
    assert any(name is not None for name, _ in run.chosen[150:]), "others are tried again now and then"
    assert run.trial_loss_s < 0.015 * run.seconds
    assert run.governor.report()["lost_s"] < 0.015 * run.seconds
    # the drafts become good ones: that is found out
    run.change(World(drafts=dict(COPIES.drafts, drop=HOPELESS.drafts["drop"]), plain_s=30 * MS, verify_s=20 * MS,
                     token_s=1 * MS))  # fmt: skip
    for _ in range(600):
        run.cycle()
    assert {name for (name, _), trial in zip(run.chosen[-50:], run.trials[-50:], strict=True) if not trial} == {"int4"}
    assert statistics.median(n for _, n in run.chosen[-50:]) in (4, 5, 6)


@pytest.mark.parametrize("seed", range(6))
def test_bad_luck_at_the_beginning_keeps_no_draft_out(seed: int) -> None:
    # `lookup` gives 2.5 tokens in 29 ms at best (86 a second), `int4` 7.4 in 62 (119); a token of it was refused early,
    # and trials have lost already what they may lose in 20 s
    int4, lookup = Draft(acceptance=(0.97,), pass_s=4 * MS), Draft(acceptance=(0.75, 0.7, 0.6), pass_s=1 * MS)
    world = World(drafts={"int4": int4, "lookup": lookup}, plain_s=20 * MS, verify_s=22 * MS, token_s=1 * MS)
    run = Run(world, Governor(12, world.copy_s, longest=8), seed)
    for name, accepted in ((None, 0),) * 3 + (("int4", 2), ("int4", 2), ("int4", 1), ("lookup", 2), ("lookup", 2)):
        passes = (world.drafts[name].pass_s,) * 2 if name else ()
        run.governor.observe(
            Cycle(draft=name, drafted=len(passes), accepted=(accepted,) if name else (), passes_s=passes,
                  verify_s=25 * MS if name else 20 * MS, emitted=1.0 + accepted)
        )  # fmt: skip
    run.governor._trials.lost(0.15)
    for _ in range(150):
        run.cycle()
    assert [name for name, _ in run.chosen[-50:]].count("int4") >= 45


def test_one_disturbed_cycle_is_got_over() -> None:
    run = Run(COMPUTE, Governor(12, COMPUTE.copy_s, longest=8), 0)
    for _ in range(200):
        run.cycle()
    disturbed = Cycle(
        draft="int4",
        drafted=2,
        accepted=(2,),
        passes_s=(0.003, 1.5),
        verify_s=2.0,
        waited_s=1.0,
        growth=(0, 0),
        emitted=3,
    )
    run.governor.observe(disturbed)  # 3.5 s in place of .024
    for _ in range(100):
        run.cycle()
    others = [choice for choice in run.chosen[-100:] if choice != ("int4", 2)]
    assert len(others) <= 30
    assert run.chosen[-50:].count(("int4", 2)) >= 45


def test_a_draft_that_proposes_all_at_once_and_not_always_as_much_as_asked() -> None:
    # prompt lookup: nothing known of routing, one lookup of .1 ms, five tokens or none in turns of ten cycles
    governor, emitted, took = Governor(12, 1e-3, longest=8), 0.0, 0.0
    for number in range(400):
        choice = governor.choose(["lookup"])
        found = min(5, choice.length) if number % 20 < 10 and choice.draft else 0
        cycle = Cycle(
            draft=choice.draft, drafted=found, accepted=(found,) if choice.draft else (), ended=found < choice.length,
            passes_s=(1e-4,) if choice.draft else (), verify_s=0.020 + 0.001 * found, emitted=1.0 + found,
        )  # fmt: skip
        governor.observe(cycle)
        emitted, took = emitted + cycle.emitted, took + cycle.total_s
    # 6 tokens in 25.1 ms and one in 20.1: 155 a second; plain steps give 50
    assert emitted / took > 0.9 * 155
    assert governor.report()["drafts"]["lookup"]["draft_s"] == pytest.approx([1e-4] * 5)


def test_untried_ones_come_first_in_order() -> None:
    governor = Governor(4, 1e-3)
    order = []
    for _ in range(7):
        choice = governor.choose(["a", "b"])
        assert choice.trial
        order.append((choice.draft, choice.length))
        governor.observe(_cycle(choice.draft, choice.length, accepted=2 if choice.draft == "a" else 0))
    assert order == [(None, 0)] * 3 + [("a", 2)] * 2 + [("b", 2)] * 2
    assert not governor.choose(["a", "b"]).trial
    assert governor.choose(["a", "b", "c"]).draft == "c", "one that comes later is tried when it comes"


def test_a_choice_by_hand() -> None:
    # plain: 10 ms. Draft passes of 1 ms, verification of 1 token 10 ms, of 3 tokens 12 ms: 1 ms a token.
    # All accepted twice: p_0 = (2 + 2 * .8) / 4 = .9 (nearly: the older cycle counts .985), p_1 = .95
    governor = Governor(4, 1e-3, longest=2)
    for _ in range(7):
        choice = governor.choose(["a", "b"])
        governor.observe(_cycle(choice.draft, choice.length, accepted=2 if choice.draft == "a" else 0))
    choice = governor.choose(["a", "b"])
    assert (choice.draft, choice.length, choice.longest) == ("a", 2, 2)
    first = (1.985 + 2 * 0.8) / 3.985
    second = (1.985 + 2 * first) / 3.985
    assert choice.rate == pytest.approx((1 + first + first * second) / 14e-3)
    # = 2.754 / 14 ms. Of b both were refused at once: p_0 = 1.6 / 3.985 = .402; one ahead, 1.402 tokens in 12 ms = 117
    assert choice.reason == "a, 2 ahead: 2.8 tokens in 14 ms (197/s); b: 117/s; none: 100/s"


def test_a_draft_stops_where_new_experts_cost_more_than_tokens_are_worth() -> None:
    governor = Governor(4, 1e-3, longest=8)
    while (choice := governor.choose(["a"])).trial or choice.length < 6:
        n = max(choice.length, 2)
        governor.observe(_cycle(choice.draft, n if choice.draft else 0, accepted=n, growth=(1,) * n))
    buffer = LookaheadBuffer(256)
    assert governor.goes_on(buffer), "the first token is always drafted"
    buffer.put(0, [0], ())
    assert governor.goes_on(buffer)
    buffer.put(1, range(1, 60), ())
    assert governor.goes_on(buffer), "the cycle has to bring these 59 experts now, and more tokens share them"
    for position in range(2, choice.longest):
        buffer.put(position, [0], ())
        assert governor.goes_on(buffer) == (position + 1 < choice.longest)


def test_the_limit_of_a_cycle_bounds_its_length_but_leaves_one() -> None:
    # n draft passes of 1 ms and a verification of 10 + n ms: 10 + 2 n
    for limit_s, longest in ((0.0165, 3), (0.0185, 4), (0.005, 1), (None, 8)):
        governor = Governor(4, 1e-3, longest=8, limit_s=limit_s)
        for _ in range(5):
            choice = governor.choose(["a"])
            governor.observe(_cycle(choice.draft, choice.length, accepted=choice.length))
        assert governor.choose(["a"]).longest == longest


def test_the_limits_of_a_cycle_are_options_of_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each generation sets its own."""
    with offload(tiny("qwen3_moe"), slots=SLOTS) as offloaded:
        assert offloaded.drafting is not None
        for name, limits in (("auto:longest=1", (1, 0.5)), ("auto:limit_s=none", (16, None)), ("auto", (16, 0.5))):
            with cycles_of(monkeypatch) as cycles:
                offloaded.generate(prompt(), max_new_tokens=12, do_sample=False, draft=name)
            governor = offloaded.drafting.governors[1]
            assert (governor.longest, governor.limit_s) == limits
            assert max(cycle.drafted for cycle in cycles) <= limits[0]
    for options in ("longest=0", "limit_s=-1", "limit_s=nan"):
        with pytest.raises(ExpertcastError, match=options.partition("=")[0]):
            check_draft(f"auto:{options}")


def test_what_is_left_to_write_bounds_the_length() -> None:
    governor = Governor(4, 1e-3, longest=8)
    for _ in range(5):
        choice = governor.choose(["a"])
        governor.observe(_cycle(choice.draft, choice.length, accepted=choice.length))
    assert governor.choose(["a"], 3).longest == 3
    assert (governor.choose(["a"], 0).draft, governor.choose([], 8).draft) == (None, None)


def test_several_sequences_count_with_their_mean() -> None:
    run = Run(COMPUTE, Governor(12, COMPUTE.copy_s, longest=8), 3, sequences=4)
    for _ in range(200):
        run.cycle()
    assert run.governor.report()["drafts"]["int4"]["acceptance"][:2] == pytest.approx([0.85, 0.7], abs=0.06)
    assert run.chosen[-30:].count(("int4", 2)) > 25


def test_a_report_is_plain_values() -> None:
    run = Run(COPIES, Governor(12, COPIES.copy_s, longest=8), 0)
    for _ in range(100):
        run.cycle()
    found = json.loads(json.dumps(run.governor.report()))
    assert sum(found["lengths"].values()) == 100
    assert found["seconds"] == pytest.approx(run.seconds)
    assert found["reasons"][0] == {"cycle": 0, "reason": "trying none: too few steps to judge it"}
    assert Governor(4, 1e-3).report()["predicted_over_actual"] is None


def test_the_tally_counts_by_draft() -> None:
    tally = Tally()
    for cycle in (
        Cycle(draft=None),
        Cycle(draft="int4", drafted=4, accepted=(4, 1)),
        Cycle(draft="int4", drafted=3, accepted=(3, 2), known=(3, 1)),
        Cycle(draft="resident", drafted=2, accepted=(0,)),
    ):
        tally.observe(cycle)
    assert tally.by_draft == {
        "int4": DraftCount(cycles=2, drafted=8 + 2, accepted=5 + 1),
        "resident": DraftCount(cycles=1, drafted=2, accepted=0),
    }


def test_refusals() -> None:
    with pytest.raises(ExpertcastError, match="longest=-1, layers=4: give 0 or more, and 1 layer or more"):
        Governor(4, 1e-3, longest=-1)
    with pytest.raises(ExpertcastError, match=r"no draft was chosen: call choose\(\) before a cycle"):
        Governor(4, 1e-3).goes_on(LookaheadBuffer(32))


def _cycle(draft: str | None, n: int, accepted: int = 0, growth: tuple[int, ...] = ()) -> Cycle:
    if draft is None:
        return Cycle(draft=None, verify_s=10e-3)
    return Cycle(
        draft=draft, drafted=n, accepted=(accepted,), passes_s=(1e-3,) * n, verify_s=(10 + n) * 1e-3, growth=growth,
        emitted=1.0 + accepted,
    )  # fmt: skip


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
