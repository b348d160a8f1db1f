"""Advice: on surveys made by hand, where the right answer is known, and on the reference model."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedModel

from expertcast.predictors import ExpertcastError, MoEView, predictor_class
from expertcast.runtime.advising.advise import (
    PrefetchOption,
    TraceObserver,
    advice_from,
    executed,
    measured_recall,
    most_to_gain,
    survey,
)
from expertcast.runtime.advising.forms import WORTH, Advice
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.policies import PRESETS, Policies
from expertcast.runtime.recording.recorder import RunStatistics
from expertcast.runtime.simulation.machine import Simulation
from expertcast.runtime.simulation.trace import RecordedPrefetches
from tests.runtime.made import Setting, decoding, layer_times, made_survey, perfect, routings

LAYERS, EXPERTS = 4, 8
# two tokens that share no expert: without a cache, or with few slots, everything is copied
TRACE = decoding(
    [[8 * layer, 8 * layer + 1] for layer in range(LAYERS)],
    [[[8 * layer + 2 * (step % 3), 8 * layer + 2 * (step % 3) + 1] for layer in range(LAYERS)] for step in range(6)],
    experts=EXPERTS,
)
WRONG = RecordedPrefetches(
    steps=[{layer: [8 * layer + 6, 8 * layer + 7] for layer in range(1, LAYERS)} for _ in range(6)]
)
COPIES = Setting(slots=12, copy_s=1.0, cache=False)
TIMES = layer_times([1.0] * LAYERS, [1.0] * LAYERS)


def _survey(asked: RecordedPrefetches, *, forecast_s: float = 0.0, setting: Setting = COPIES) -> Any:
    own = replace(TIMES, forecast_s=[forecast_s] * LAYERS)
    return made_survey(TRACE, TIMES, setting, {("made", asked.ahead): (asked, own)})


def _advised(advice: Advice[PrefetchOption]) -> tuple[bool, str | None, int | None]:
    """Whether to prefetch, and with what."""
    return advice.facts["prefetch"], advice.chosen.predictor, advice.chosen.ahead


def test_copies_as_long_as_compute_are_prefetched() -> None:
    advice = advice_from(_survey(perfect(TRACE)))
    assert _advised(advice) == (True, "made", 1)
    assert advice.options[0].tpot_s == 4 * (2.0 + 2.0)
    assert advice.chosen.tpot_s == 2.0 + 4 * 2.0  # the first layer's copies, then compute alone
    assert advice.facts["most_to_gain"] == 0.5
    assert "waiting for copies is 50%" in advice.reasons[0]
    assert "can gain at most 50%" in advice.reasons[0]
    assert advice.text().startswith("advice: prefetch with made, 1 layer ahead; expect 1e+04 ms per token")


def test_advice_as_a_configuration() -> None:
    """What is advised goes into the configuration that was given, whose other fields stay."""
    given = OffloadConfig(slots=12, cache=False, bandwidth=1e9, layers=[1])
    advised = advice_from(_survey(perfect(TRACE, 2))).chosen.config(given)
    assert advised == OffloadConfig(slots=12, cache=False, bandwidth=1e9, predictor="made", ahead=2)
    on_demand = advice_from(_survey(WRONG)).chosen.config(replace(given, mode="hybrid", predictor="other", ahead=3))
    assert on_demand == OffloadConfig(slots=12, cache=False, bandwidth=1e9)


def test_forecasts_that_cost_more_than_they_hide() -> None:
    advice = advice_from(_survey(perfect(TRACE), forecast_s=3.0))
    assert _advised(advice) == (False, None, None)
    assert advice.chosen.tpot_s == 16.0
    assert advice.text().startswith("advice: load on demand")


def test_wrong_forecasts_are_not_followed() -> None:
    advice = advice_from(_survey(WRONG))
    assert not advice.facts["prefetch"]
    assert advice.options[1].tpot_s >= 16.0


def test_a_gain_too_small_to_be_worth_it() -> None:
    right_once = RecordedPrefetches(steps=[{1: keys[1][:1]} for keys in routings(TRACE)])
    small = replace(COPIES, copy_s=0.1)
    advice = advice_from(_survey(right_once, setting=small))
    assert 1 - advice.options[1].tpot_s / advice.options[0].tpot_s == pytest.approx(0.1 / 8.8)
    assert WORTH > 0.1 / 8.8
    assert not advice.facts["prefetch"]


def test_further_ahead_pays_where_misses_are_uneven() -> None:
    """Layer 3 alone has new experts: two layers' compute hides its copies, one layer's does not."""
    steady = [[0, 1], [8, 9], [16, 17]]
    trace = decoding(
        [*steady, [24, 25]],
        [[*steady, [24 + 2 * (step % 3) + 2, 24 + 2 * (step % 3) + 3]] for step in range(6)],
        experts=EXPERTS,
    )
    setting = Setting(slots=10, copy_s=2.0)
    forecasts = {
        ahead: RecordedPrefetches(ahead=ahead, steps=[{3: keys[3]} for keys in routings(trace)]) for ahead in (1, 2)
    }
    found = made_survey(trace, TIMES, setting, {("made", ahead): (forecasts[ahead], TIMES) for ahead in (1, 2)})
    advice = advice_from(found)
    assert [option.tpot_s for option in advice.options[:3]] == [12.0, 10.0, 8.0]
    assert _advised(advice) == (True, "made", 2)


@pytest.mark.parametrize(("forecasts", "forecast_s"), [(WRONG, 0.0), (perfect(TRACE), 3.0)])
def test_the_fastest_row_is_advised_though_the_run_on_demand_was_disturbed(
    forecasts: RecordedPrefetches, forecast_s: float
) -> None:
    """The run on demand took 6 s more than its layers: it did not compute slower without forecasts than with them."""
    found = _survey(forecasts, forecast_s=forecast_s)
    advice = advice_from(replace(found, case=found.case.with_times(replace(TIMES, late_s=6.0))))
    on_demand, exact, *_ = advice.options
    assert advice.chosen is on_demand
    assert on_demand.tpot_s == 16.0 <= exact.tpot_s
    assert "6e+03 ms left out, since runs with forecasts computed faster" in advice.notes


def test_policies_of_a_survey(reference_model: PreTrainedModel, one: dict[str, Any]) -> None:
    policies = Policies(eviction="fifo", scope="layer")
    found = survey(
        reference_model, one["input_ids"], OffloadConfig(slots=64, policies=policies), new_tokens=2, repetitions=1
    )
    assert found.case.policies == policies
    for other in ("activeevict", "specmd_2"):
        config = OffloadConfig(slots=64, policies=PRESETS[other].policies)
        with pytest.raises(ExpertcastError, match="a survey records which experts ran"):
            survey(reference_model, one["input_ids"], config)


def test_speculation_is_named_with_its_price() -> None:
    advice = advice_from(_survey(WRONG))
    assert advice.options[2].mode == "speculate"
    assert advice.options[2].tpot_s == 10.0


def test_most_to_gain() -> None:
    stats = RunStatistics(3)
    run = Simulation(decode=stats, prefill=stats, steps_s=[20.0], waits_s=[[5.0, 1.0, 4.0]])
    assert most_to_gain(run, [2.0, 2.0, 6.0]) == (2.0 + 1.0 + 4.0) / 20.0
    assert most_to_gain(run, [2.0, 0.5, 6.0]) == (2.0 + 0.5 + 4.0) / 20.0
    assert most_to_gain(run, [2.0, 2.0, 6.0], ahead=2) == (4.0 + 1.0 + 4.0) / 20.0
    assert most_to_gain(run, [0.5, 0.5, 0.5], ahead=9) == 1.5 / 20.0


# ---- forecasts of a run


def test_what_was_watched() -> None:
    """A prefill and a step; the last layer asks for key 2 on behalf of the next token, which is no forecast."""
    watched = TraceObserver()
    for layer, keys in ((0, [3, 1]), (1, [9]), (0, [2])):
        watched.needed(layer, keys)
    watched.requested(1, [9])
    watched.needed(1, [8])
    watched.requested(0, [2])
    trace, asked = watched.trace(decoding([[], []], [], experts=8).shape), watched.forecasts(1)
    assert trace == decoding([[3, 1], [9]], [[[2], [8]]], experts=8)
    assert asked == RecordedPrefetches(steps=[{1: [9]}])
    assert measured_recall(trace, asked) == {1: 0.0}
    assert routings(executed(trace, asked, [1])) == [[[2], [9]]]
    assert routings(executed(trace, asked, [0])) == routings(trace)


# ---- the reference model


def test_survey_and_advice(reference_model: PreTrainedModel, one: dict[str, Any]) -> None:
    found = survey(
        reference_model,
        one["input_ids"],
        OffloadConfig(slots=64, cache=False, bandwidth=4e7),
        predictors=["next_norm"],
        new_tokens=6,
        repetitions=1,
    )
    assert (found.trace.shape.layers, found.trace.shape.top_k, found.experts, found.block_bytes) == (12, 4, 768, 36864)
    assert found.speed.copy_s >= 36864 / 4e7
    assert (found.case.slots, found.case.cache, found.case.machine.window) == (64, False, 1)
    assert found.trace.steps == 5
    assert 0.5 < found.forecasting_of("next_norm", 1).mean_recall < 1
    assert set(found.forecasting_of("next_norm", 1).recall) == set(range(1, 12))
    advice = advice_from(found)
    on_demand, exact, speculated = advice.options
    assert on_demand.bytes_per_token == 12 * 4 * 36864
    assert on_demand.tpot_s <= found.tpot_s + 1e-9  # what it was calibrated to, without disturbances
    assert 0.8 * on_demand.bytes_per_token < exact.bytes_per_token < 1.5 * on_demand.bytes_per_token
    assert on_demand.tpot_s > 12 * 4 * 36864 / 4e7
    assert exact.wait_s < on_demand.wait_s
    assert 11 / 12 <= speculated.hit_rate < 1  # the rest is the first layer's, which are the last token's again
    assert json.loads(json.dumps(advice.as_dict(), allow_nan=False))["options"][1]["predictor"] == "next_norm"
    for line in ("on_demand", "exact", "speculate", "64 of 768 experts in 2.359 MB"):
        assert line in advice.text()


def test_every_distance_is_surveyed(
    reference_model: PreTrainedModel, reference_view: MoEView, one: dict[str, Any]
) -> None:
    cls = predictor_class("next_norm")
    predictor = cls(cls.config_class(ahead=(1, 3)), reference_view.shape)
    config = OffloadConfig(slots=128, bandwidth=1e9)
    found = survey(reference_model, one["input_ids"], config, predictors=[predictor], new_tokens=3, repetitions=1)
    assert set(found.forecasting) == {("next_norm", 1), ("next_norm", 3)}
    assert set(found.forecasting_of("next_norm", 3).recall) == set(range(3, 12))


def test_when_nothing_can_be_hidden(reference_model: PreTrainedModel, one: dict[str, Any]) -> None:
    common: dict[str, Any] = {"new_tokens": 4, "repetitions": 1, "predictors": ["next_norm"]}
    found = survey(reference_model, one["input_ids"], OffloadConfig(slots=64), **common)
    advice = advice_from(found)  # copies in the model's own thread
    assert not advice.facts["prefetch"]
    assert "compute cannot hide its copies" in advice.reasons[0]
    every = OffloadConfig(slots=768, bandwidth=1e8)
    found = survey(reference_model, one["input_ids"], every, **common)
    times = found.case.machine.times
    disturbed = replace(found, case=found.case.with_times(replace(times, late_s=times.late_s + 1)))  # on demand only
    assert disturbed.predict().tpot_s > disturbed.predict("next_norm").tpot_s + 0.9
    advice = advice_from(disturbed)
    assert not advice.facts["prefetch"]
    assert advice.facts["slots"] == advice.facts["experts"] == 768
    assert "all 768 experts fit" in advice.reasons[0]


def test_bad_input(reference_model: PreTrainedModel, one: dict[str, Any]) -> None:
    ids = one["input_ids"]
    with pytest.raises(ExpertcastError, match="new_tokens=1"):
        survey(reference_model, ids, new_tokens=1)
    with pytest.raises(ExpertcastError, match="repetitions=0"):
        survey(reference_model, ids, repetitions=0)
    with pytest.raises(ExpertcastError, match=r"prompt_ids has shape \[2, "):
        survey(reference_model, ids.repeat(2, 1))
    with pytest.raises(ExpertcastError, match="unknown predictor"):
        survey(reference_model, ids, predictors=["nobody"])
    with pytest.raises(ExpertcastError, match="slots=2"):
        survey(reference_model, ids, OffloadConfig(slots=2))
    with pytest.raises(ExpertcastError, match="names a predictor"):
        survey(reference_model, ids, OffloadConfig(predictor="next_norm"))
