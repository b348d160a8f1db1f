"""The benchmark: what it reports is what the runs did."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from expertcast.commands.bench import runs_table
from expertcast.predictors import ExpertcastError
from expertcast.runtime import OffloadConfig, benchmark
from expertcast.runtime.benchmarking.bench import BenchSettings, Measured, Run, StepTimes, report, step_times
from expertcast.runtime.benchmarking.runs import Decoding
from expertcast.runtime.recording.recorder import Recorder
from tests.runtime.conftest import PROMPT


def test_benchmark(reference_model: PreTrainedModel, reference_tokenizer: Any) -> None:
    few = OffloadConfig(slots=8, cache=False)
    runs = {
        "on_demand": few,
        "exact": replace(few, predictor="next_norm"),
        "speculate": replace(few, predictor="next_norm", mode="speculate"),
        "cached": OffloadConfig(slots=768),
    }
    settings = BenchSettings(new_tokens=6, repetitions=2)
    got = benchmark(reference_model, reference_tokenizer, PROMPT, runs, settings, bandwidth=2e7)
    on_demand, exact, speculated, cached = (got["runs"][name] for name in runs)
    block = 36864
    assert on_demand["bytes_per_token"] == 12 * 4 * block
    assert on_demand["hit_rate"] == 0.0
    # layer 0 has no forecast: its last token's experts are asked for, which costs bytes where they are others
    assert 12 * 4 * block <= speculated["bytes_per_token"] <= 13 * 4 * block
    assert 11 / 12 <= speculated["hit_rate"] < 1
    assert on_demand["bytes_per_token"] <= exact["bytes_per_token"] < 1.5 * on_demand["bytes_per_token"]
    assert cached["bytes_per_token"] < on_demand["bytes_per_token"] / 4
    assert [run["identical"] for run in (on_demand, exact, speculated, cached)] == [True, True, False, True]
    assert exact["same_tokens"]
    copying = 12 * 4 * block / 2e7
    assert on_demand["tpot_s"] > copying
    assert on_demand["waited_s_per_token"] > 0.3 * copying
    assert exact["tpot_quartiles_s"][0] <= exact["tpot_s"] <= exact["tpot_quartiles_s"][1]
    for run in (on_demand, exact, speculated, cached):
        assert run["compute_s"] + run["copy_s"] + run["idle_s"] == pytest.approx(run["tpot_mean_s"], rel=0.05)
        for name, least, most in (("link_utilisation", 0, 1), ("tpot_over_bound", 1, math.inf)):
            assert (run[name] is None) == (name in run["not_given"])
            assert run[name] is None or least < run[name] <= most or run[name] == least
    assert on_demand["overlap_efficiency"] is None
    assert on_demand["bound_s"] == pytest.approx(max(on_demand["bound_s"], copying))
    if "overlap_efficiency" not in speculated["not_given"]:
        hidden = (on_demand["tpot_s"] - speculated["tpot_s"]) / on_demand["hideable_s"]
        assert speculated["overlap_efficiency"] == pytest.approx(min(hidden, 1.0))
    assert cached["bound_s"] is not None
    assert got["bandwidth"] == 2e7


def test_balanced_bandwidth(reference_model: PreTrainedModel, reference_tokenizer: Any) -> None:
    got = benchmark(reference_model, reference_tokenizer, PROMPT, {}, BenchSettings(new_tokens=4, repetitions=1))
    layer_s = got["resident"]["tpot_s"] / 12
    assert got["bandwidth"] == pytest.approx(4 * 36864 / layer_s)


def test_bad_input(reference_model: PreTrainedModel, reference_tokenizer: Any) -> None:
    with pytest.raises(ExpertcastError, match="new_tokens=1"):
        benchmark(reference_model, reference_tokenizer, PROMPT, {}, BenchSettings(new_tokens=1))
    with pytest.raises(ExpertcastError, match="no token"):
        benchmark(reference_model, reference_tokenizer, "", {})


def test_split_of_a_recorded_step() -> None:
    recorder = Recorder()
    for _ in range(2):
        recorder.step_start()
        begin = time.perf_counter()
        for layer in range(3):
            for state in ("policy", "forecast", "wait", "compute"):
                recorder.enter(state, layer)
        # two threads: what both copy at once is one copying's time, of what began first
        for layer, start, end in ((0, 0.0, 0.25e-6), (1, 0.25e-6, 0.75e-6), (2, 0.5e-6, 1.5e-6), (1, 0.6e-6, 0.7e-6)):
            recorder.copied(layer * 8, layer, begin + start, begin + end, urgent=True)
        recorder.enter("compute", 3)
        recorder.step_end()
    steps = step_times(recorder, layers=3)
    assert len(steps) == 2
    for step, (start, end) in zip(steps, recorder.steps(), strict=True):
        assert step.copy_L == pytest.approx([0.25e-6, 0.5e-6, 0.75e-6, 0.0], abs=1e-9)
        assert all(seconds > 0 for seconds in step.compute_L)
        assert sum(step.compute_L) + step.forecast + step.wait + step.idle == pytest.approx(end - start)


def made_run(steps: list[StepTimes], *tpots_s: float, moved: int = 80, **arguments: Any) -> Run:
    """A repetition for each time per token."""
    stats = {"bytes_moved": moved, "hit_rate": 0.25, "waited_s": 0.0}
    run = Run(OffloadConfig(**arguments))
    for tpot_s in tpots_s:
        decoding = Decoding([1, 2, 3], [torch.ones(2)] * 3, 0.5, [tpot_s] * len(steps))
        run.repetitions.append(Measured(decoding, stats, steps, link_bytes=80, link_busy_s=8.0))
    return run


def test_figures_follow_their_definitions() -> None:
    on_demand = made_run([StepTimes([1.0, 2.0, 3.0], [2.0, 1.0, 0.0])] * 2, 9.0)
    prefetch = made_run([StepTimes([1.0, 2.0, 3.0], [0.0, 3.0, 0.0], forecast=0.5, wait=0.25, idle=0.5)] * 2, 7.5)
    truth = prefetch.repetitions[0].decoding
    got = report(prefetch, on_demand=on_demand, truth=truth, link_rate=20.0)
    assert got["hideable_s"] == 2.0  # min(1, 2) + min(2, 1)
    assert got["overlap_efficiency"] == 0.75
    assert got["overlap_efficiency_forecast_layers"] == 1.5  # layer 0 has no forecast
    assert got["bound_s"] == 6.0  # computing takes longer than copying
    assert got["tpot_over_bound"] == 1.25
    assert got["link_utilisation"] == 0.5
    assert (got["compute_s"], got["copy_s"], got["idle_s"]) == (6.5, 0.25, 0.5)
    assert got["bytes_per_token"] == 40
    assert got["identical"]
    assert report(on_demand, on_demand=on_demand, truth=truth, link_rate=None)["overlap_efficiency"] is None
    assert report(prefetch, on_demand=None, truth=truth, link_rate=None)["bound_s"] is None


STEPS = [StepTimes([1.0, 2.0, 3.0], [2.0, 1.0, 0.0])] * 4  # 2 can be hidden; no run takes less than 6


@pytest.mark.parametrize(
    ("tpots_s", "overlap", "over_bound"),
    [
        ([7.4, 7.5, 7.6], 0.75, 1.25),  # the other's are 8.9, 9.0, 9.1: standard errors of .072 each, .051 of hideable
        ([6.9, 7.0, 7.1], 1.0, 7.0 / 6),
        ([6.85, 6.9, 6.95], 1.0, 6.9 / 6),  # 1.05, by less than the noise
        ([2.5, 2.6, 2.4], "too noisy: 3 repetitions, spread 0.051", "too noisy: 3 repetitions, spread 0.017"),
        ([2.5], "too noisy: 1 repetition, spread 0.036", "too noisy: 1 repetition, spread 0.012"),
        ([4.0, 7.0, 10.0], "too noisy: 3 repetitions, spread 1.1", 7.0 / 6),
        ([1.0, 5.5, 10.0], "too noisy: 3 repetitions, spread 1.6", "too noisy: 3 repetitions, spread 0.54"),
        ([9.4, 9.5, 9.6], -0.25, 9.5 / 6),  # forecasts that cost more than they hide are a finding
    ],
)
def test_figures_that_cannot_be(tpots_s: list[float], overlap: float | str, over_bound: float | str) -> None:
    on_demand, run = made_run(STEPS, 8.9, 9.0, 9.1), made_run(STEPS, *tpots_s)
    got = report(run, on_demand=on_demand, truth=run.repetitions[0].decoding, link_rate=20.0)
    for name, expected in (("overlap_efficiency", overlap), ("tpot_over_bound", over_bound)):
        if isinstance(expected, str):
            assert (got[name], got["not_given"][name]) == (None, expected)
        else:
            assert got[name] == pytest.approx(expected)
            assert name not in got["not_given"]
    row = runs_table({"run": got})
    assert ("too noisy" in row) == bool(got["not_given"])


def test_copying_less_is_no_overlap() -> None:
    """A run that copies half the bytes takes 1.5 less for that; no schedule of it must copy the other half."""
    steps = [StepTimes([1.0, 1.0], [2.0, 1.0])] * 2
    on_demand, run = made_run(steps, 5.0, 5.0), made_run(steps, 2.5, 2.5, moved=40)
    got = report(run, on_demand=on_demand, truth=run.repetitions[0].decoding, link_rate=20.0)
    assert got["overlap_efficiency"] == pytest.approx((5.0 - 2.5 - 1.5) / 2)
    assert got["bound_s"] == 2.0
    assert got["tpot_over_bound"] == 1.25


def test_a_link_is_not_faster_than_itself() -> None:
    run = made_run(STEPS, 9.0)
    for rate, used in ((20.0, 0.5), (9.8, 1.0), (5.0, None)):
        got = report(run, on_demand=None, truth=run.repetitions[0].decoding, link_rate=rate)
        assert got["link_utilisation"] == used
    assert got["not_given"] == {"link_utilisation": "too noisy: 1 repetition, spread 0.025"}


def test_other_logits_are_not_identical() -> None:
    run = made_run([StepTimes([1.0], [1.0])], 1.0)
    other = Decoding([1, 2, 3], [torch.ones(2), torch.ones(2), torch.tensor([1.0, 2.0])], 0.5, [1.0])
    assert not report(run, on_demand=None, truth=other, link_rate=None)["identical"]
    shorter = Decoding([1, 2], [torch.ones(2)] * 2, 0.5, [1.0])
    assert not report(run, on_demand=None, truth=shorter, link_rate=None)["identical"]
