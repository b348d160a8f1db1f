"""Whole texts through slots: the traces of the resident model byte for byte, each expert read once per forward."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from expertcast import offload
from expertcast.data.capture import ActivationStream
from expertcast.data.collect import collect
from expertcast.data.experts import experts_of
from expertcast.data.means import MeanOutputs
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.online import OnlineTraces
from expertcast.data.plan import make_plan, pad_windows
from expertcast.data.stand_in import stand_in_nbytes
from expertcast.data.text import Document, load_documents
from expertcast.data.traces import TraceDataset
from expertcast.predictors import PredictorConfig, predictor_class
from expertcast.runtime.policies import Policies
from expertcast.runtime.recording.recorder import Observer
from tests.families.models import tiny_model
from tests.runtime.conftest import assert_same, greedy, refused

SETTINGS: dict[str, Any] = {"tokens": 160, "window": 24, "batch_size": 3}
STORES: dict[str, dict[str, Any]] = {
    "memory": {}, "disk": {"store": "disk"}, "coded": {"store": "disk", "codec": "bitsplit"},
    "instant": {"store": "disk", "link": "instant"},
}  # fmt: skip


def documents() -> list[Document]:
    return load_documents("reference")[:80]


def content(traces: TraceDataset) -> dict[str, object]:
    """Bytes of every file but the card; of trace.json what it says, but for the time and the digest over it."""
    files: dict[str, object] = {
        path.relative_to(traces.folder).as_posix(): path.read_bytes()
        for path in traces.folder.rglob("*")
        if path.is_file() and path.name != "README.md"
    }
    note = json.loads((traces.folder / "trace.json").read_text())
    return files | {"trace.json": {key: note[key] for key in note if key not in ("collection_s", "digest")}}


@pytest.mark.parametrize(
    ("family", "slots", "store"),
    [
        ("qwen3_moe", 10, "memory"),  # a layer fits, and a part of the next
        ("gpt_oss", 3, "instant"),  # chunks of one expert; biases, transposed weights
        ("qwen2_moe", 20, "disk"),  # shared experts
        ("deepseek_v2", 6, "coded"),  # a dense first layer, groups
    ],
)
def test_the_same_traces(family: str, slots: int, store: str, reference_tokenizer: Any, tmp_path: Path) -> None:
    """Residuals, logits, early residuals, default vectors, stand-in, skeleton, fingerprints."""
    model = tiny_model(family)
    plain = content(collect(model, reference_tokenizer, documents(), tmp_path / "plain", **SETTINGS))
    assert {"default_vectors.safetensors", "stand_in.safetensors"} <= plain.keys()
    with offload(model, slots=slots, **STORES[store]) as offloaded:
        traces = collect(offloaded, reference_tokenizer, documents(), tmp_path / "offloaded", **SETTINGS)
        assert offloaded.stats.total.bytes_moved > 0
    assert content(traces) == plain


def test_executed_forecasts_and_lossy_policies_leave_traces_as_they_are(
    reference_tokenizer: Any, tmp_path: Path
) -> None:
    """What is collected is the model's own routing, whatever the offload makes of it when it decodes."""
    model = tiny_model("qwen3_moe")
    plain = content(collect(model, reference_tokenizer, documents(), tmp_path / "plain", **SETTINGS))
    for name, options in {
        "speculate": {"mode": "speculate", "predictor": "next_norm", "speculate_prefill": True},
        "drop": {"policies": Policies(miss="drop", routing="cache_aware")},
        "no cache": {"cache": False},
    }.items():
        with offload(model, slots=8, **options) as offloaded:
            traces = collect(offloaded.model, reference_tokenizer, documents(), tmp_path / name, **SETTINGS)
        assert content(traces) == plain, name


class Loads(Observer):
    """Counts copies by expert."""

    def __init__(self) -> None:
        self.keys: Counter[int] = Counter()

    def copied(self, key: int, layer: int, start: float, end: float, urgent: bool) -> None:
        self.keys[key] += 1


@pytest.mark.parametrize("slots", [3, 10, 20])
def test_each_expert_is_read_once_per_forward(slots: int, reference_tokenizer: Any) -> None:
    """A batch with padding; the head is not computed."""
    model, loads = tiny_model("qwen3_moe"), Loads()
    plan = make_plan(documents(), reference_tokenizer, tokens=800, window=24)
    model.lm_head.register_forward_pre_hook(lambda *_: pytest.fail("the head ran"))
    with offload(model, slots=slots, store="disk", observers=[loads]) as offloaded:
        experts = experts_of(model)
        windows = plan.windows["train"]
        batch = pad_windows(windows)
        assert not batch.mask_BS.all(), "the batch is padded"
        means = MeanOutputs(experts.view)
        stream = ActivationStream(model, experts.view, windows, means=means)
        offloaded.reset_stats()
        stream.run(batch)
        total = offloaded.stats.total
        used_LE = torch.stack(means.count_E)
        assert loads.keys == Counter(used_LE.flatten().nonzero().flatten().tolist())
        assert total.bytes_moved == sum(loads.keys.values()) * offloaded.store.layout.block_bytes
        assert total.bytes_moved <= offloaded.store.nbytes
        assert total.requests == len(loads.keys)


def test_by_default_a_forward_takes_the_memory_of_the_longest_sequence(
    reference_tokenizer: Any, tmp_path: Path
) -> None:
    """And a collection that was begun goes on in its own batches."""
    model = tiny_model("qwen3_moe")
    counts = []
    for context in (32, 64):
        with offload(model, slots=8, store="disk", context=context) as offloaded:
            counts.append(offloaded.experts.windows(2))
            fewest = offloaded.experts.windows(10_000)
            kept = stand_in_nbytes(offloaded.experts.view, 2)
            with_stand_in = offloaded.experts.windows(2, kept)
    assert 2 * counts[0] <= counts[1] <= 2 * counts[0] + 1
    assert fewest == 1
    assert kept > 0
    assert with_stand_in < counts[1]
    settings = {**SETTINGS, "batch_size": None, "window": 2, "tokens": 120, "early_rank": 2}
    plain = collect(model, reference_tokenizer, documents(), tmp_path / "plain", **settings)
    assert plain.info["settings"]["batch_size"] == 8
    with offload(model, slots=32, store="disk", context=64) as offloaded:
        traces = collect(offloaded, reference_tokenizer, documents(), tmp_path / "offloaded", **settings)
        assert traces.info["settings"]["batch_size"] == with_stand_in
        again = collect(offloaded, reference_tokenizer, documents(), tmp_path / "plain", **settings)
    assert again.info == plain.info
    assert collect(model, reference_tokenizer, documents(), tmp_path / "offloaded", **settings).info == traces.info


def test_online_as_from_the_resident_model(reference_tokenizer: Any) -> None:
    model = tiny_model("qwen2_moe")
    plain = OnlineTraces(model, reference_tokenizer, documents(), **SETTINGS)
    expected = plain.defaults.as_tensors() | plain.stand_in.state_dict()  # type: ignore[union-attr]
    batches = [list(plain.batches("validation", 50))]
    with offload(model, slots=9) as offloaded:
        online = OnlineTraces(offloaded, reference_tokenizer, documents(), **SETTINGS)
        found = online.defaults.as_tensors() | online.stand_in.state_dict()  # type: ignore[union-attr]
        batches.append(list(online.batches("validation", 50)))
        assert online.info == plain.info
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    for own, other in zip(*batches, strict=True):
        assert torch.equal(own.residual_TLD, other.residual_TLD)
        assert torch.equal(own.logits_TLE, other.logits_TLE)


def test_generation_is_right_afterwards(
    reference_model: PreTrainedModel, one: dict[str, torch.Tensor], reference_tokenizer: Any, tmp_path: Path
) -> None:
    """After a collection, and after one that was cut short between request and copies."""
    expected = greedy(reference_model, one, 6)
    settings: dict[str, Any] = {"tokens": 130, "window": 64, "early_rank": None}
    with offload(reference_model, slots=100, predictor="next_norm", forecasts="always") as offloaded:
        assert_same(greedy(offloaded, one, 6), expected)
        collect(offloaded, reference_tokenizer, documents(), tmp_path / "whole", **settings)
        assert_same(greedy(offloaded, one, 6), expected)
        wait = offloaded.link.wait
        offloaded.link.wait = lambda _copy: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            collect(offloaded, reference_tokenizer, documents(), tmp_path / "cut", **settings)
        offloaded.link.wait = wait  # type: ignore[method-assign]
        assert_same(greedy(offloaded, one, 6), expected)


def test_what_follows_early_attention_is_in_the_way(reference_tokenizer: Any, tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    cls = predictor_class("early_attention")
    predictor = cls(cls.config_class(), find_moe_layers(model).shape)
    assert isinstance(predictor.config, PredictorConfig)
    with offload(model, slots=8, predictor=predictor) as offloaded, refused("offload without a predictor"):
        collect(offloaded, reference_tokenizer, documents(), tmp_path / "traces", **SETTINGS)
