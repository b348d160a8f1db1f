"""What users do to an offloaded model, and how an offload ends: right to the bit, or one clear error."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from expertcast.predictors import ExpertcastError
from expertcast.runtime import EmulatedLink, offload
from expertcast.runtime.links.disk import DiskLink
from expertcast.runtime.recording.recorder import Observer
from tests.families.models import tiny_model
from tests.runtime.conftest import assert_same, greedy
from tests.runtime.faults import INPUTS, RaiseAt, Result, facts_of, slow_link, still_right


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("qwen3_moe")


@pytest.fixture
def expected(model: PreTrainedModel) -> Result:
    return greedy(model, INPUTS)


# what users do to an offloaded model -------------------------------------------------------------------------------


def test_use_after_close(model: PreTrainedModel, expected: Result) -> None:
    offloaded = offload(model, slots=5, predictor="next_norm", link=slow_link())
    offloaded.close()
    offloaded.close()
    for use in (lambda: offloaded.generate(**INPUTS), lambda: offloaded(**INPUTS), offloaded.__enter__):
        with pytest.raises(ExpertcastError, match="this offload is closed"):
            use()
    assert_same(greedy(model, INPUTS), expected)
    with still_right(model, expected):
        pass


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.to(torch.float32),
        lambda model: model.half(),
        lambda model: model.to("meta"),
        lambda model: model.share_memory(),
        lambda model: model.base_model.to(torch.float32),
        lambda model: model.model.layers[2].float(),
        lambda model: model.model.layers[2].mlp.experts.double(),
        lambda model: model.to_empty(device="cpu"),
    ],
)
def test_the_model_is_moved(move: Callable[[Any], Any], model: PreTrainedModel, expected: Result) -> None:
    with still_right(model, expected) as offloaded:
        with pytest.raises(ExpertcastError, match="close the offload before moving or converting"):
            move(model)
        assert model.to("cpu").to(torch.bfloat16) is model, "to where it is"
        assert_same(greedy(offloaded, INPUTS), expected)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("slots", [5, 8])
def test_weights_cannot_be_saved_loaded_or_copied(
    slots: int, model: PreTrainedModel, expected: Result, tmp_path: Path
) -> None:
    """With as many slots as experts, slots even have the weights' shapes."""
    weights = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    part = {name: tensor for name, tensor in weights.items() if ".2.mlp.experts." in name}
    with still_right(model, expected, slots=slots):
        for what in (
            lambda: model.state_dict(),
            lambda: model.model.layers[2].mlp.state_dict(),
            lambda: model.save_pretrained(tmp_path),
            lambda: model.load_state_dict(weights),
            lambda: model.load_state_dict(part, strict=False),
            lambda: model.model.layers[2].mlp.experts.load_state_dict(
                {name.rpartition(".")[2]: tensor for name, tensor in part.items()}
            ),
            lambda: copy.deepcopy(model),
            lambda: copy.deepcopy(model.model.layers[2]),
        ):
            with pytest.raises(ExpertcastError, match="close the offload before"):
                what()
    assert not list(tmp_path.glob("*.safetensors"))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
def test_the_experts_implementation_is_changed(implementation: str, model: PreTrainedModel, expected: Result) -> None:
    with still_right(model, expected, slots=16) as offloaded:
        model.set_experts_implementation(implementation)
        for run in (lambda: offloaded(**INPUTS), lambda: model.generate(**INPUTS, max_new_tokens=2)):
            with pytest.raises(ExpertcastError, match=f"implementation was changed to '{implementation}'"):
                run()
        model.set_experts_implementation("expertcast")
        assert_same(greedy(offloaded, INPUTS), expected)
        model.set_experts_implementation(implementation)
        model.set_experts_implementation("expertcast")


def test_closed_while_the_implementation_is_another(model: PreTrainedModel, expected: Result) -> None:
    facts = facts_of(model)
    with offload(model, slots=5):
        model.set_experts_implementation("eager")
    assert facts_of(model) == facts
    assert_same(greedy(model, INPUTS), expected)


def test_parameters_replaced(model: PreTrainedModel, expected: Result) -> None:
    with still_right(model, expected) as offloaded:
        experts = offloaded.view[1].experts
        mine = experts.down_proj
        experts.down_proj = nn.Parameter(torch.zeros_like(mine), requires_grad=False)
        with pytest.raises(ExpertcastError, match="down_proj was changed or moved while the model is offloaded"):
            offloaded(**INPUTS)
        experts.down_proj = mine


def test_inference_mode(model: PreTrainedModel, expected: Result) -> None:
    """Offloaded and closed within: the weights that are put back are no inference tensors."""
    with torch.inference_mode(), still_right(model, expected):
        pass
    assert not any(parameter.is_inference() for parameter in model.parameters())
    with torch.inference_mode():
        offloaded = offload(model, slots=5, predictor="next_norm")
    assert_same(greedy(offloaded, INPUTS), expected)
    offloaded.close()
    model(**INPUTS, labels=INPUTS["input_ids"]).loss.backward()


# the end -----------------------------------------------------------------------------------------------------------


def test_closed_with_prefetches_under_way(model: PreTrainedModel, expected: Result) -> None:
    """A slow link is still busy with forecasts when the offload is closed."""
    link = EmulatedLink(1e9, 5e-3)
    facts, threads = facts_of(model), threading.active_count()
    offloaded = offload(model, slots=16, predictor="next_norm", link=link, overfetch=4.0)
    handle = offloaded.view[2].block.register_forward_pre_hook(RaiseAt(2, KeyError()))
    with pytest.raises(KeyError), offloaded:
        greedy(offloaded, INPUTS)
    handle.remove()
    assert facts_of(model) == facts
    assert threading.active_count() == threads
    assert_same(greedy(model, INPUTS), expected)


def test_closed_from_a_hook(model: PreTrainedModel, expected: Result) -> None:
    """Within a forward the slots cannot be taken away: one error, and the offload is as it was."""
    with still_right(model, expected) as offloaded:
        handle = offloaded.view[1].block.register_forward_hook(lambda *_args: offloaded.close())
        with pytest.raises(ExpertcastError, match="a forward of this model is running"):
            greedy(offloaded, INPUTS)
        handle.remove()


def test_dropped_without_close() -> None:
    """Model, store and the link's thread go when nobody holds the model any more."""
    threads = threading.active_count()
    model = tiny_model("qwen3_moe")
    offloaded = offload(model, slots=5, predictor="next_norm", link=slow_link())
    greedy(offloaded, INPUTS)
    gone = [weakref.ref(thing) for thing in (model, offloaded.store, offloaded.link, offloaded.view[0].experts)]
    del model, offloaded
    gc.collect()
    gc.collect()  # the link's thread lets go of the store as it ends
    assert [thing() for thing in gone] == [None] * len(gone)
    assert threading.active_count() == threads


class _Holder(Observer):
    """Holds a model, and drops it in the thread in which a copy arrives."""

    def __init__(self) -> None:
        self.held: list[object] = []
        self.let_go = threading.Event()

    def copied(self, key: int, layer: int, start: float, end: float, urgent: bool) -> None:
        if self.let_go.is_set():
            self.held.clear()
            gc.collect()


@pytest.mark.parametrize("disk", [False, True])
def test_dropped_in_the_links_own_thread(disk: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose end it cannot wait for; all threads end."""
    unraisable, holder = list[object](), _Holder()
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    link, store = (DiskLink(bandwidth=30e3), "disk") if disk else (EmulatedLink(30e3), "memory")
    offloaded = offload(tiny_model("qwen3_moe"), slots=5, observers=[holder], link=link, store=store)
    del link
    gone = weakref.ref(offloaded.model)
    gc.collect()
    offloaded.link.submit(3, 0, urgent=True)  # takes a tenth of a second
    holder.held.append(offloaded)
    del offloaded
    holder.let_go.set()
    deadline = time.monotonic() + 10
    while (gone() is not None or _own_threads()) and time.monotonic() < deadline:
        time.sleep(0.2)
        gc.collect()  # the store goes when the link's threads have let go of it
    assert gone() is None
    assert not _own_threads()
    assert not unraisable


def _own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("expertcast")]


def test_the_handle_is_dropped(model: PreTrainedModel, expected: Result) -> None:
    """The model goes on from its slots."""
    offload(model, slots=5, predictor="next_norm", link=slow_link())
    gc.collect()
    assert_same(greedy(model, INPUTS), expected)
    model._expertcast.close()  # or the link's thread ends while some other test counts threads
