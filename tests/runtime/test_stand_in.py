"""An offload where a tool expects a model: it answers as the model does, and what cannot be is refused by one line."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from expertcast import OffloadedModel, load_offloaded, offload
from expertcast.data.models import load_model
from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors import ExpertcastError
from tests.families.models import tiny_model
from tests.runtime.conftest import assert_same, greedy, refused
from tests.runtime.faults import INPUTS, Result, still_right


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("qwen3_moe")


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> Result:
    return greedy(model, INPUTS)


@pytest.fixture
def offloaded(model: PreTrainedModel) -> Iterator[OffloadedModel]:
    with offload(model, slots=8, predictor="next_norm", forecasts="always") as made:
        yield made


def test_it_answers_as_the_model(model: PreTrainedModel, offloaded: OffloadedModel) -> None:
    for kind in (PreTrainedModel, GenerationMixin, nn.Module, OffloadedModel):
        assert isinstance(offloaded, kind)
    assert type(offloaded) is OffloadedModel
    assert offloaded.__class__.__name__ == type(model).__name__
    for name in ("device", "dtype", "config", "generation_config", "name_or_path", "main_input_name", "base_model"):
        assert getattr(offloaded, name) is getattr(model, name) or getattr(offloaded, name) == getattr(model, name)
    assert offloaded.can_generate()
    assert offloaded.get_input_embeddings() is model.get_input_embeddings()
    assert [id(own) for own in offloaded.parameters()] == [id(own) for own in model.parameters()]
    assert dict(offloaded.named_modules())["lm_head"] is model.lm_head
    assert offloaded.eval() is offloaded
    assert offloaded.to("cpu") is offloaded
    assert getattr(offloaded, "hf_device_map", None) is None
    assert not hasattr(offloaded, "no_such_thing")
    assert {"generate", "stats", "lm_head", "config"} <= set(dir(offloaded))


def test_what_is_the_models_is_set_there(model: PreTrainedModel, offloaded: OffloadedModel) -> None:
    kept, changed = model.generation_config, copy.deepcopy(model.generation_config)
    offloaded.generation_config = changed
    assert model.generation_config is changed
    offloaded.generation_config = kept
    offloaded.note = "its own"
    assert not hasattr(model, "note")
    with pytest.raises(ExpertcastError, match="this model is offloaded already"):
        offload(offloaded)


def test_what_it_has_itself_stays_its_own(offloaded: OffloadedModel, expected: Result) -> None:
    """`generate` is the offload's, with its draft."""
    sequences = offloaded.generate(**INPUTS, max_new_tokens=8, do_sample=False, draft="resident")
    assert torch.equal(sequences, expected[0])
    assert offloaded.stats.as_dict()["drafts"]["by_sequences"]


def adapter(block: nn.Module, name: str) -> nn.Module:
    """What PEFT does: a module that holds what it adapts, in its place."""
    wrapper = nn.Module()
    wrapper.base_layer = block.get_submodule(name)
    wrapper.forward = wrapper.base_layer.forward  # type: ignore[method-assign]
    block.add_module(name, wrapper)
    return wrapper


@pytest.mark.parametrize(
    ("reason", "take"),
    [
        ("pickling or copying", lambda model: pickle.dumps(model)),
        ("pickling or copying", lambda model: torch.save(model, io.BytesIO())),
        ("pickling or copying", lambda model: torch.save(model.model.layers[1], io.BytesIO())),
        ("pickling or copying", lambda model: copy.copy(model)),
        ("before copying", lambda model: copy.deepcopy(model)),
        ("accelerate cannot dispatch", lambda model: accelerate.dispatch_model(model, {"": "cpu"})),
        ("accelerate cannot dispatch", lambda model: accelerate.cpu_offload(model)),
        ("accelerate cannot dispatch", lambda model: accelerate.disk_offload(model, "unused")),
        ("before saving the model", lambda model: model.state_dict()),
    ],
)
def test_the_models_weights_are_asked_for(
    reason: str, take: Callable[[Any], Any], model: PreTrainedModel, expected: Result, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with still_right(model, expected) as offloaded:
        for given in (model, offloaded) if "pickling" not in reason and "copying" not in reason else (model,):
            with pytest.raises(ExpertcastError, match=reason) as refused:
                take(given)
            assert "\n" not in str(refused.value)
            assert "close the offload" in str(refused.value)
    assert not list(tmp_path.iterdir())
    assert pickle.loads(pickle.dumps(model)) is not None


@pytest.mark.parametrize(
    "take", [pickle.dumps, copy.copy, copy.deepcopy, lambda offloaded: torch.save(offloaded, io.BytesIO())]
)
def test_the_offload_is_copied(take: Callable[[Any], Any], model: PreTrainedModel, expected: Result) -> None:
    with (
        still_right(model, expected) as offloaded,
        pytest.raises(ExpertcastError, match=r"cannot be pickled, saved by torch\.save or copied: save its"),
    ):
        take(offloaded)


@pytest.mark.parametrize("name", ["experts", "gate"])
def test_a_part_is_replaced(name: str, model: PreTrainedModel, expected: Result) -> None:
    with still_right(model, expected) as offloaded:
        block = offloaded.view[1].block
        adapted = adapter(block, name)
        with pytest.raises(ExpertcastError, match=rf"{name!r} of an MoE layer was replaced by a Module .* unload\(\)"):
            offloaded(**INPUTS)
        block.add_module(name, adapted.base_layer)


def _held(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    accelerate.disk_offload(model, folder)
    return model


@pytest.mark.parametrize(
    ("line", "put"),
    [
        ("a DataParallel is a module around a model: pass the model inside", lambda model, _: nn.DataParallel(model)),
        ("a Sequential is a module around a model: pass the model inside", lambda model, _: nn.Sequential(model)),
        ("accelerate moves this model's weights while it runs: load the model without device_map", _held),
    ],
)
def test_a_model_that_something_else_holds(line: str, put: Callable[[Any, Path], Any], tmp_path: Path) -> None:
    for use in (offload, find_moe_layers):
        with refused(line):
            use(put(tiny_model("qwen3_moe"), tmp_path / use.__name__))


def test_no_expert_and_one_expert(tmp_path: Path) -> None:
    with refused("its routers choose 0 experts of 8"):
        offload(tiny_model("qwen3_moe", num_experts_per_tok=0))
    tiny_model("qwen3_moe", num_experts=1, num_experts_per_tok=1).save_pretrained(tmp_path)
    expected = greedy(load_model(tmp_path), INPUTS)
    for given in ({}, {"store": "disk"}, {"store": "disk", "in_place": True}):
        with load_offloaded(tmp_path, device="cpu", slots=2, **given) as offloaded:
            assert_same(greedy(offloaded, INPUTS), expected)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "target",
    [
        {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "target_modules": []},
        {"target_modules": ["gate"]},
    ],
)
def test_lora_on_experts_and_routers(
    when: str, target: dict[str, Any], model: PreTrainedModel, expected: Result
) -> None:
    peft = pytest.importorskip("peft", reason="pip install peft")
    config = peft.LoraConfig(r=2, init_lora_weights=False, **target)
    if when == "before":
        adapted = peft.get_peft_model(model, config)
        with pytest.raises(ExpertcastError, match=r"is an adapter on routers or experts.*adapt attention only"):
            offload(model, slots=5)
        adapted.unload()
    with still_right(model, expected) as offloaded:
        if when == "after":
            adapted = peft.get_peft_model(model, config)
            with pytest.raises(ExpertcastError, match=r"was replaced by a .* while the model is offloaded"):
                offloaded(**INPUTS)
            adapted.unload()
    assert_same(greedy(model, INPUTS), expected)
