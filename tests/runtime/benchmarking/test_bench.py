"""The benchmark reports what the runs did; greedy decoding, the shared store, drafts."""

from __future__ import annotations

import math
import re
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import expertcast
from expertcast import OffloadConfig, offload
from expertcast.commands.advise import ON_DEMAND, WORTH, advice_from
from expertcast.commands.output import runs_table
from expertcast.data.moe_layers import experts_implementation, find_moe_layers
from expertcast.predictors import ExpertcastError
from expertcast.runtime.benchmarking.bench import (
    Bench,
    BenchSettings,
    BorrowedStore,
    Decoding,
    Measured,
    Run,
    StepTimes,
    decode_greedily,
    decode_resident,
    measure,
    report,
    same_logits,
    step_times,
    without_experts_to,
)
from expertcast.runtime.config import draft_bytes, slots_for
from expertcast.runtime.drafts.kinds import QuantisedExperts, expected_bytes
from expertcast.runtime.recording.recorder import Recorder
from expertcast.runtime.storage.layout import BlockLayout
from expertcast.runtime.storage.store import ExpertStore
from tests.families.models import tiny_model
from tests.runtime.conftest import PROMPT
from tests.runtime.drafts.by_hand import resident_views


def test_benchmark(reference_model: PreTrainedModel, reference_tokenizer: Any) -> None:
    store = BorrowedStore(find_moe_layers(reference_model), torch.device("cpu"))
    few = OffloadConfig(slots=8, cache=False, store=store, bandwidth=4e7)
    runs = {
        "on_demand": few,
        "exact": replace(few, predictor="next_norm"),
        "speculate": replace(few, predictor="next_norm", mode="speculate", forecasts="always"),
        "cached": replace(few, slots=768, cache=True),
    }
    settings = BenchSettings(new_tokens=6, repetitions=1)
    prompt_ids = reference_tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    resident = decode_resident(reference_model, prompt_ids, settings.new_tokens)
    try:
        got = measure(reference_model, prompt_ids, runs, settings, resident=resident).reports
    finally:
        store.give_back()
    on_demand, exact, speculated, cached = (got[name] for name in runs)
    block = 36864
    assert on_demand["bytes_per_token"] == 12 * 4 * block
    assert on_demand["hit_rate"] == 0.0
    # layer 0 has no forecast: its last token's experts are prefetched, which costs bytes if they are wrong
    assert 12 * 4 * block <= speculated["bytes_per_token"] <= 13 * 4 * block
    assert 11 / 12 <= speculated["hit_rate"] < 1
    assert on_demand["bytes_per_token"] <= exact["bytes_per_token"] < 1.5 * on_demand["bytes_per_token"]
    assert cached["bytes_per_token"] < on_demand["bytes_per_token"] / 4
    assert [run["identical"] for run in (on_demand, exact, speculated, cached)] == [True, True, False, True]
    assert exact["same_tokens"]
    copying = 12 * 4 * block / 4e7
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


def test_bad_input() -> None:
    with pytest.raises(ExpertcastError, match="new_tokens=1"):
        BenchSettings(new_tokens=1)


def test_split_of_a_recorded_step() -> None:
    recorder = Recorder()
    begin = time.perf_counter()
    recorder.copied(0, 0, begin - 1, begin, urgent=False)  # before the first step: counts for none
    for _ in range(2):
        recorder.step_start()
        begin = time.perf_counter()
        for layer in range(3):
            for state in ("policy", "forecast", "wait", "compute"):
                recorder.enter(state, layer)
        # two threads: overlapping copies count once, for the copy that began first
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
    """Return a run with one repetition per time per token."""
    stats = {"bytes_moved": moved, "hit_rate": 0.25, "waited_s": 0.0}
    run = Run(OffloadConfig(**arguments))
    for tpot_s in tpots_s:
        decoding = Decoding([1, 2, 3], [torch.ones(2)] * 3, 0.5, [tpot_s] * len(steps))
        run.repetitions.append(Measured(decoding, stats, steps, link_bytes=80, link_busy_s=8.0))
    return run


@pytest.mark.parametrize(
    ("others", "slots", "advised", "reason"),
    [
        ({"next_norm, 1 ahead": (7.5, 7.6), "other": (7.7, 7.8)}, 8, "next_norm, 1 ahead", "hide at most 3%"),
        ({"next_norm, 1 ahead": (9.0 * (1 - 0.9 * WORTH),) * 2}, 8, ON_DEMAND, "waiting for copies is 3%"),
        ({"next_norm, 1 ahead": (9.0 * (1 - 1.1 * WORTH),) * 2}, 8, "next_norm, 1 ahead", "hit rate 25%"),
        ({"next_norm, 1 ahead": (2.0, 12.0)}, 8, ON_DEMAND, "hide at most"),  # noise
        ({"next_norm, 1 ahead": (7.5, 7.5)}, 768, ON_DEMAND, "all 768 experts fit the slots"),
        ({}, 8, ON_DEMAND, "compute cannot hide its copies"),
    ],
)  # fmt: skip
def test_advice_on_prefetching(
    reference_model: PreTrainedModel, others: dict[str, tuple[float, ...]], slots: int, advised: str, reason: str
) -> None:
    steps = [StepTimes([1.0, 2.0, 3.0], [2.0, 1.0, 0.0], wait=0.25, idle=2.75)] * 2
    runs = {name: made_run(steps, *tpots_s) for name, tpots_s in {ON_DEMAND: (9.0, 9.0), **others}.items()}
    runs[ON_DEMAND].slots = slots
    truth = runs[ON_DEMAND].repetitions[0].decoding
    reports = {name: report(run, on_demand=runs[ON_DEMAND], truth=truth, link_rate=20.0) for name, run in runs.items()}
    facts, text = advice_from(Bench(runs, None, 20.0, reports), find_moe_layers(reference_model))
    assert facts["advice"] == advised
    assert (facts["tpot_s"], facts["on_demand_s"]) == (runs[advised].tpot_s, 9.0)
    assert text.startswith("advice: " + ("load on demand" if advised == ON_DEMAND else f"prefetch with {advised}"))
    assert reason in text
    assert f"{slots} of 768 experts" in text


def test_figures_follow_their_definitions() -> None:
    on_demand = made_run([StepTimes([1.0, 2.0, 3.0], [2.0, 1.0, 0.0])] * 2, 9.0)
    prefetch = made_run([StepTimes([1.0, 2.0, 3.0], [0.0, 3.0, 0.0], forecast=0.5, wait=0.25, idle=0.5)] * 2, 7.5)
    truth = prefetch.repetitions[0].decoding
    got = report(prefetch, on_demand=on_demand, truth=truth, link_rate=20.0)
    assert got["hideable_s"] == 2.0  # min(1, 2) + min(2, 1)
    assert got["overlap_efficiency"] == 0.75
    assert got["bound_s"] == 6.0  # computation is longer than copying
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
        ([7.4, 7.5, 7.6], 0.75, 1.25),  # on demand: 8.9, 9.0, 9.1; standard errors of .072 each, .051 of hideable
        ([6.9, 7.0, 7.1], 1.0, 7.0 / 6),
        ([6.85, 6.9, 6.95], 1.0, 6.9 / 6),  # 1.05, above 1 by less than the noise
        ([2.5, 2.6, 2.4], "too noisy: 3 repetitions, spread 0.051", "too noisy: 3 repetitions, spread 0.017"),
        ([2.5], "too noisy: 1 repetition, spread 0.036", "too noisy: 1 repetition, spread 0.012"),
        ([4.0, 7.0, 10.0], "too noisy: 3 repetitions, spread 1.1", 7.0 / 6),
        ([1.0, 5.5, 10.0], "too noisy: 3 repetitions, spread 1.6", "too noisy: 3 repetitions, spread 0.54"),
        ([9.4, 9.5, 9.6], -0.25, 9.5 / 6),  # forecasts may cost more than they hide
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
    table = runs_table({"run": got})
    assert ("  ~" in table) == ("~: too noisy" in table) == bool(got["not_given"])


def test_the_parts_of_a_step_stand_beside_their_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few slow steps raise the mean, of which compute, copies and idle are parts, above the median."""
    monkeypatch.setenv("COLUMNS", "200")
    steps = [StepTimes([seconds], [0.0], wait=0.25, idle=0.5) for seconds in (1.0, 1.0, 31.0)]
    run = made_run(steps, 1.75)
    run.repetitions[0].decoding.steps_s[:] = [1.75, 1.75, 31.75]
    names, row, legend = runs_table(
        {"run": report(run, on_demand=None, truth=run.repetitions[0].decoding, link_rate=None)}
    ).splitlines()
    found = dict(zip(re.split("  +", names), re.split("  +", row), strict=False))
    assert (found["TPOT ms"], found["mean"]) == ("1750.00", "11750.00")
    assert sum(float(found[name]) for name in ("compute", "copy", "idle")) == float(found["mean"])
    assert "mean = compute + copy + idle" in legend


def test_copying_less_is_no_overlap() -> None:
    """A run that copies half the bytes is 1.5 s faster for that; its bound excludes the other half."""
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


# A shared store serves one offload after another; `give_back` restores the model's parameters


PROMPT_IDS = torch.arange(5).unsqueeze(0)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_offloads_in_turn(family: str) -> None:
    model = tiny_model(family)
    parameters = dict(model.named_parameters())
    weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    with experts_implementation(model, "grouped_mm"):
        expected = decode_greedily(model, PROMPT_IDS, 4)
        store = BorrowedStore(find_moe_layers(model), torch.device("cpu"))
        with store.resident():
            assert same_logits(decode_greedily(model, PROMPT_IDS, 4), expected)
        for slots in (4, 9):
            with offload(model, store=store, slots=slots) as offloaded:
                assert offloaded.store is store
                assert same_logits(decode_greedily(model, PROMPT_IDS, 4), expected)
        store.give_back()
        assert same_logits(decode_greedily(model, PROMPT_IDS, 4), expected)
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]
        assert parameter.equal(weights[name]), name


def test_the_weights_lie_once() -> None:
    model = tiny_model("qwen3_moe")
    view = find_moe_layers(model)
    store = BorrowedStore(view, torch.device("cpu"))
    block = store.block(store.experts + 3)
    lent = view[1].experts.down_proj[3]
    assert block.data_ptr() <= lent.data_ptr() < block.data_ptr() + len(block)


def test_a_model_fits_what_is_free_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth more than its weights, however large the device is."""
    store = BorrowedStore(find_moe_layers(tiny_model("qwen3_moe")), torch.device("cpu"))
    assert store.fits
    store.device = torch.device("cuda")
    for free in (1.05, 1.15):
        numbers = (int(free * store.nbytes), 2 * store.nbytes)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device, numbers=numbers: numbers)
        assert store.fits == (free > 1.1)


def test_everything_but_experts_moves() -> None:
    model = tiny_model("glm4_moe_lite")
    without_experts_to(model, torch.device("meta"))
    experts = tuple(layer.experts_name for layer in find_moe_layers(model))
    for name, parameter in model.named_parameters():
        assert parameter.is_meta != name.startswith(experts), name
    assert all(buffer.is_meta for buffer in model.buffers())


IDS = torch.arange(10, 22)[None]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("mixtral", dtype=torch.float32)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_bytes_are_known_before_there_is_a_draft(family: str, precision: str) -> None:
    view = find_moe_layers(tiny_model(family))
    assert expected_bytes(view, precision) == QuantisedExperts(view, resident_views(view), precision).nbytes


def test_memory_is_for_slots_and_draft_together(model: PreTrainedModel) -> None:
    view = find_moe_layers(model)
    block, draft = BlockLayout.of(view).block_bytes, expected_bytes(view, "int4")
    store = ExpertStore(view)

    def slots(**fields: Any) -> int:
        config = OffloadConfig(**fields)
        return slots_for(config, store, {f"draft={config.draft!r}": draft_bytes(config, view)})

    assert slots(memory=9 * block + draft, draft="int4") == 9
    assert slots(memory=9 * block) == 9
    with pytest.raises(ExpertcastError, match=r"beside .* for draft='int4'"):
        slots(memory=block + draft, draft="int4")


def test_a_configuration_says_what_generate_drafts_with(model: PreTrainedModel) -> None:
    with expertcast.offload(model, slots=6, draft="resident") as offloaded:
        drafted = offloaded.generate(IDS, max_new_tokens=8, do_sample=False)
        report = offloaded.stats.as_dict()["drafts"]
        assert "resident" in report["by_sequences"]["1"]["drafts"]
        count = report["by_draft"]["resident"]
        assert count["hard"] + count["soft"] + count["mismatch"] == pytest.approx(1)
        assert 0 < count["hard"] < 1
        assert 0 < count["coverage"] <= 1
        plain = offloaded.generate(IDS, max_new_tokens=8, do_sample=False, draft="none")
    assert torch.equal(drafted, plain)
    with pytest.raises(ExpertcastError, match="verified by the exact model"):
        OffloadConfig(draft="int4", policies="specmd_3")
