"""The benchmark: what it reports is what the runs did."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from expertcast.predictors import ExpertcastError
from expertcast.runtime import OffloadConfig, benchmark
from expertcast.runtime.benchmarking.bench import BenchSettings
from expertcast.runtime.benchmarking.bench_report import Measured, Run, StepTimes, report, step_times
from expertcast.runtime.benchmarking.decoding import Decoding
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
    assert cached["tpot_s"] < on_demand["tpot_s"]
    assert exact["tpot_quartiles_s"][0] <= exact["tpot_s"] <= exact["tpot_quartiles_s"][1]
    assert got["resident"]["tpot_s"] < on_demand["tpot_s"]
    for run in (on_demand, exact, speculated, cached):
        assert run["compute_s"] + run["copy_s"] + run["idle_s"] == pytest.approx(run["tpot_mean_s"], rel=0.05)
        assert run["link_utilisation"] == pytest.approx(1.0, abs=0.05)
    assert on_demand["overlap_efficiency"] is None
    assert on_demand["bound_s"] == pytest.approx(max(on_demand["bound_s"], copying))
    assert on_demand["tpot_over_bound"] > 1
    assert (
        0
        < speculated["overlap_efficiency"]
        == pytest.approx((on_demand["tpot_s"] - speculated["tpot_s"]) / on_demand["hideable_s"])
    )
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
        for layer in range(3):
            begin = time.perf_counter()
            for state in ("policy", "forecast", "wait", "compute"):
                recorder.enter(state, layer)
            recorder.copied(layer * 8, layer, begin, begin + 0.25 * (layer + 1), urgent=True)
        recorder.enter("compute", 3)
        recorder.step_end()
    steps = step_times(recorder, layers=3)
    assert len(steps) == 2
    for step, (start, end) in zip(steps, recorder.steps(), strict=True):
        assert step.copy_L == pytest.approx([0.25, 0.5, 0.75, 0.0])
        assert all(seconds > 0 for seconds in step.compute_L)
        assert sum(step.compute_L) + step.forecast + step.wait + step.idle == pytest.approx(end - start)


def made_run(steps: list[StepTimes], tpot_s: float, **arguments: Any) -> Run:
    decoding = Decoding([1, 2, 3], [torch.ones(2)] * 3, 0.5, [tpot_s] * len(steps))
    stats = {"bytes_moved": 80, "hit_rate": 0.25, "waited_s": 0.0}
    return Run(OffloadConfig(**arguments), [Measured(decoding, stats, steps, link_bytes=80, link_busy_s=8.0)])


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


def test_other_logits_are_not_identical() -> None:
    run = made_run([StepTimes([1.0], [1.0])], 1.0)
    other = Decoding([1, 2, 3], [torch.ones(2), torch.ones(2), torch.tensor([1.0, 2.0])], 0.5, [1.0])
    assert not report(run, on_demand=None, truth=other, link_rate=None)["identical"]
    shorter = Decoding([1, 2], [torch.ones(2)] * 2, 0.5, [1.0])
    assert not report(run, on_demand=None, truth=shorter, link_rate=None)["identical"]
