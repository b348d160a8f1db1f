"""Generating with several drafts, measured in alternation; memory for a draft beside the slots."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

import expertcast
from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors import ExpertcastError
from expertcast.runtime.benchmarking.bench import BenchSettings, bench_drafts
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.drafts.quantised import QuantisedExperts, expected_bytes
from expertcast.runtime.offloading import slot_count
from expertcast.runtime.storage.layout import BlockLayout
from tests.families.models import tiny_model
from tests.runtime.drafts.by_hand import resident_views

PROMPT = torch.arange(10, 22)[None]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("mixtral", dtype=torch.float32)


def test_every_draft_is_measured_and_gives_the_same_text(model: PreTrainedModel) -> None:
    found = bench_drafts(
        model, PROMPT, OffloadConfig(slots=6), ["int4", "resident", "int4"], BenchSettings(new_tokens=6, repetitions=2)
    )
    assert list(found) == ["none", "int4", "resident"]
    assert all(run["identical"] and run["tpot_s"] > 0 for run in found.values())
    assert found["none"]["over_none"] == 1.0
    view = find_moe_layers(model)
    assert found["int4"]["memory_bytes"] == QuantisedExperts.of(view, resident_views(view), "int4").nbytes
    assert found["resident"]["memory_bytes"] == found["none"]["memory_bytes"] == 0
    lengths = found["int4"]["governor"]["by_sequences"]["1"]["lengths"]
    assert sum(lengths.values()) > 6


def test_an_unknown_draft_is_refused_before_anything_runs(model: PreTrainedModel) -> None:
    with pytest.raises(ExpertcastError, match="unknown draft 'int3'"):
        bench_drafts(model, PROMPT, OffloadConfig(slots=6), ["int3"], BenchSettings(new_tokens=6, repetitions=1))


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_bytes_are_known_before_there_is_a_draft(family: str, precision: str) -> None:
    view = find_moe_layers(tiny_model(family))
    assert expected_bytes(view, precision) == QuantisedExperts.of(view, resident_views(view), precision).nbytes


def test_memory_is_for_slots_and_draft_together(model: PreTrainedModel) -> None:
    view = find_moe_layers(model)
    block, draft = BlockLayout.of(view).block_bytes, expected_bytes(view, "int4")
    config = OffloadConfig(memory=9 * block + draft, draft="int4")
    assert slot_count(config, view) == 9
    assert slot_count(OffloadConfig(memory=9 * block), view) == 9
    with pytest.raises(ExpertcastError, match=r"beside .* bytes for draft='int4'"):
        slot_count(OffloadConfig(memory=block + draft, draft="int4"), view)


def test_a_configuration_says_what_generate_drafts_with(model: PreTrainedModel) -> None:
    with expertcast.offload(model, slots=6, draft="resident") as offloaded:
        drafted = offloaded.generate(PROMPT, max_new_tokens=8, do_sample=False)
        assert "resident" in offloaded.stats.as_dict()["drafts"]["by_sequences"]["1"]["drafts"]
        plain = offloaded.generate(PROMPT, max_new_tokens=8, do_sample=False, draft="none")
    assert torch.equal(drafted, plain)
    with pytest.raises(ExpertcastError, match="verified by the exact model"):
        OffloadConfig(draft="int4", policies="specmd_3")
