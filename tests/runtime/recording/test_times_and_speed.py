"""Link speed and recorded steps: short runs of the reference model."""

from __future__ import annotations

import math
import os
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from expertcast.predictors import ExpertcastError
from expertcast.runtime.benchmarking.bench import link_rate, step_times
from expertcast.runtime.links.emulated import EmulatedLink
from expertcast.runtime.offloading import offload
from expertcast.runtime.recording.recorder import Observer, Recorder
from tests.families.models import tiny_model
from tests.runtime.links.manual import ManualLink
from tests.runtime.made import record


def test_recorded_decoding_leaves_the_prefill_out(reference_model: PreTrainedModel, one: dict[str, Any]) -> None:
    recorder = Recorder()
    with offload(
        reference_model, bandwidth=1e9, slots=100, predictor="next_norm", forecasts="always", observers=[recorder]
    ) as offloaded:
        seconds = record(offloaded, one["input_ids"], 5, recorder)
        stats = offloaded.stats.total
    assert len(seconds) == len(recorder.steps()) == 4
    assert (stats.steps, stats.requests) == (4 * 12, 4 * 12 * 4)
    steps = step_times(recorder, 12)
    for step in steps:
        assert min(step.compute_L[:12]) > 0
        assert 0 < step.forecast < max(seconds)
        assert sum(step.compute_L) + step.idle < max(seconds)
    assert statistics.median(copy.seconds for copy in recorder.copies()) == pytest.approx(36864 / 1e9)


@pytest.mark.parametrize("latency", [0.0, 2e-3])
def test_speed_of_the_emulated_link(reference_model: PreTrainedModel, one: dict[str, Any], latency: float) -> None:
    """The measured speed does not exceed the configured one, and the measurement does not change the run."""
    recorder = Recorder()
    with offload(reference_model, bandwidth=5e7, latency=latency, slots=60, observers=[recorder]) as offloaded:
        record(offloaded, one["input_ids"], 2, recorder)
        before, counted = offloaded.pool.block(0).clone(), offloaded.link.bytes_moved
        rate = link_rate(offloaded.link, offloaded.store)
        assert offloaded.link.bytes_moved == counted
        assert torch.equal(offloaded.pool.block(0), before)
        record(offloaded, one["input_ids"], 2, recorder)
    assert 0 < rate <= 36864 / (latency + 36864 / 5e7)


def test_speed_of_other_links() -> None:
    """The speed of a link given as an object is measured too; that of an unknown link cannot be."""
    model = tiny_model("qwen3_moe")
    for link, least, most in (("instant", 1e6, math.inf), (EmulatedLink(1e8), 0, 1e8)):
        with offload(model, link=link) as offloaded:
            assert least < link_rate(offloaded.link, offloaded.store) <= most
    with (
        offload(model, link=ManualLink()) as offloaded,
        pytest.raises(ExpertcastError, match="link 'manual' cannot be measured"),
    ):
        link_rate(offloaded.link, offloaded.store)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_speed_of_a_cuda_link(reference_model: PreTrainedModel) -> None:
    reference_model.to("cuda")
    try:
        with offload(reference_model) as offloaded:
            rate = link_rate(offloaded.link, offloaded.store)
    finally:
        reference_model.to("cpu")
    assert rate > 1e8


# What counts as waiting for copies


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system keeps what it has read")
def test_copies_in_the_models_thread_are_waited_for(tmp_path: Path) -> None:
    """Copies include the reads of a store on disk by link `instant`, which no other count shows."""

    class Told(Observer):
        def __init__(self) -> None:
            self.copied_s = [0.0] * 4

        def copied(self, key: int, layer: int, start: float, end: float, urgent: bool) -> None:
            self.copied_s[layer] += end - start

    told = Told()
    with offload(
        tiny_model("qwen3_moe"), slots=4, store="disk", store_folder=tmp_path, link="instant", observers=[told]
    ) as offloaded:
        with (tmp_path / "experts.safetensors").open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        offloaded.model(input_ids=torch.tensor([[5, 9, 2]]))
        layers, copies = offloaded.stats.layers, offloaded.link.copies
    assert copies == offloaded.stats.total.misses > 8
    for layer, copied_s in zip(layers, told.copied_s, strict=True):
        assert layer.waited_s >= copied_s > 0, "every copy was waited for, for as long as it took"
