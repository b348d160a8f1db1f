"""A store lent to several offloads, and the peer."""

from __future__ import annotations

import pytest
import torch

from expertcast.data.moe_layers import experts_implementation, find_moe_layers
from expertcast.runtime import offload
from expertcast.runtime.benchmarking.runs import (
    LentStore,
    decode_greedily,
    measure_peer,
    same_logits,
    without_experts_to,
)
from expertcast.runtime.benchmarking.shapes import weight_bytes
from tests.families.models import tiny_model

# A lent store serves one offload after another, and the model gets its own parameters back in the end


PROMPT_IDS = torch.arange(5).unsqueeze(0)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_offloads_in_turn(family: str) -> None:
    model = tiny_model(family)
    parameters = dict(model.named_parameters())
    weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    with experts_implementation(model, "grouped_mm"):
        expected = decode_greedily(model, PROMPT_IDS, 4)
        store = LentStore(find_moe_layers(model), torch.device("cpu"))
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
    store = LentStore(view, torch.device("cpu"))
    block = store.block(store.experts + 3)
    lent = view[1].experts.down_proj[3]
    assert block.data_ptr() <= lent.data_ptr() < block.data_ptr() + len(block)


def test_everything_but_experts_moves() -> None:
    model = tiny_model("glm4_moe_lite")
    without_experts_to(model, torch.device("meta"))
    experts = tuple(layer.experts_name for layer in find_moe_layers(model))
    for name, parameter in model.named_parameters():
        assert parameter.is_meta != name.startswith(experts), name
    assert all(buffer.is_meta for buffer in model.buffers())


# accelerate's own offload beside ours: the same model, and left as it was


PEER_PROMPT_IDS = torch.arange(6).unsqueeze(0)


def test_peer_decodes_the_same_and_leaves_the_model() -> None:
    model = tiny_model("qwen3_moe")
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with experts_implementation(model, "grouped_mm"):
        truth = decode_greedily(model, PEER_PROMPT_IDS, 4)
    whole = weight_bytes(model)
    found = measure_peer(model, PEER_PROMPT_IDS, memory=whole // 2, new_tokens=3, bandwidth=1e6, truth=truth)
    assert found["identical"]
    assert found["tpot_s"] > 0
    experts = sum(weight_bytes(layer.experts) for layer in find_moe_layers(model))
    assert experts < found["moved_bytes"] <= whole
    assert found["least_tpot_s"] == found["moved_bytes"] / 1e6
    assert "moves nothing here" in found["note"]
    for name, parameter in model.named_parameters():
        assert parameter.equal(weights[name]), name
    with experts_implementation(model, "grouped_mm"):
        assert decode_greedily(model, PEER_PROMPT_IDS, 4).tokens == truth.tokens


def test_more_memory_moves_less() -> None:
    model = tiny_model("qwen3_moe")
    whole = weight_bytes(model)
    moved = [
        measure_peer(model, PEER_PROMPT_IDS, memory=memory, new_tokens=2)["moved_bytes"]
        for memory in (whole * 9 // 10, whole // 2)
    ]
    assert moved[0] < moved[1]
