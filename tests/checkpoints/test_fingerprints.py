"""Checkpoints detect changes of a model, in every form in which its fingerprints exist."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import expertcast
from expertcast.checkpoints.checkpoint import PredictorCheckpoint, load_predictor, save_predictor
from expertcast.data.collect import collect
from expertcast.data.models import load_tokenizer, meta_model
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.text import load_documents
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError
from expertcast.training.fit import fit
from tests.families.models import tiny_model
from tests.families.table import tiny_family

FAMILY = "hy_v3"
"""Its router is given a bias by its block."""


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> TraceDataset:
    return collect(
        tiny_family(FAMILY), load_tokenizer("reference"), load_documents(["reference"]),
        tmp_path_factory.mktemp("traces") / "of", tokens=200, window=20,
    )  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(traces: TraceDataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "quasi_hidden"
    save_predictor(fit("quasi_hidden", traces).predictor, folder, view=traces.view)
    return folder


def _one_expert(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.experts.down_proj.data[5] *= 1.25


ROUTING = "router or norm"
CHANGES: dict[str, tuple[Callable[[PreTrainedModel], object], str]] = {
    "router": (lambda model: model.model.layers[1].mlp.gate.weight.data[3].mul_(1.25), ROUTING),
    "norm": (lambda model: model.model.layers[2].post_attention_layernorm.weight.data[3].mul_(1.25), ROUTING),
    "bias": (lambda model: model.model.layers[1].mlp.e_score_correction_bias[3].add_(1.0), ROUTING),
    "expert": (_one_expert, "expert"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_refused(change: str, checkpoint: Path) -> None:
    model = tiny_family(FAMILY)
    load_predictor(checkpoint, find_moe_layers(model))
    with torch.no_grad():
        CHANGES[change][0](model)
    with pytest.raises(ExpertcastError, match=f"different {CHANGES[change][1]} weights") as caught:
        expertcast.offload(model, predictor=checkpoint)
    assert "\n" not in str(caught.value)


def test_the_same_in_every_form(checkpoint: Path, traces: TraceDataset, tmp_path: Path) -> None:
    """Experts too where they are at hand: not in slots, not on their way from a file, not in fp16."""
    model = tiny_model("mixtral")
    view = find_moe_layers(model)
    own, experts = view.fingerprint(), view.experts_fingerprint()
    assert experts is not None
    with expertcast.offload(model, slots=8) as offloaded:
        slots = find_moe_layers(model)
        assert (slots.fingerprint(), slots.experts_fingerprint()) == (own, None)
        assert offloaded.view.fingerprint() == own
    assert find_moe_layers(model).experts_fingerprint() == experts
    wide = find_moe_layers(tiny_model("mixtral").float())
    assert (wide.fingerprint(), wide.experts_fingerprint()) == (own, experts)
    assert find_moe_layers(tiny_model("mixtral").half()).experts_fingerprint() is None
    assert find_moe_layers(meta_model(model.config)).experts_fingerprint() is None
    model.save_pretrained(tmp_path)
    for store in ("memory", "disk"):
        with expertcast.load_offloaded(tmp_path, dtype=torch.bfloat16, device="cpu", store=store, slots=8) as loaded:
            assert loaded.view.fingerprint() == own
    kept = traces.view
    assert kept.experts_fingerprint() == traces.info["experts_fingerprint"]
    assert PredictorCheckpoint.open(checkpoint).config["experts_fingerprint"] == kept.experts_fingerprint()
    assert kept.experts_fingerprint() == find_moe_layers(tiny_family(FAMILY)).experts_fingerprint()
