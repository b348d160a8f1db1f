"""accelerate's own offload beside ours: the same model, and left as it was."""

from __future__ import annotations

import torch

from expertcast.data.moe_layers import experts_implementation, find_moe_layers
from expertcast.runtime.benchmarking.runs import decode_greedily, measure_peer
from expertcast.runtime.benchmarking.shapes import weight_bytes
from tests.families.models import tiny_model

PROMPT_IDS = torch.arange(6).unsqueeze(0)


def test_peer_decodes_the_same_and_leaves_the_model() -> None:
    model = tiny_model("qwen3_moe")
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with experts_implementation(model, "grouped_mm"):
        truth = decode_greedily(model, PROMPT_IDS, 4)
    whole = weight_bytes(model)
    found = measure_peer(model, PROMPT_IDS, memory=whole // 2, new_tokens=3, bandwidth=1e6, truth=truth)
    assert found["identical"]
    assert found["tpot_s"] > 0
    experts = sum(weight_bytes(layer.experts) for layer in find_moe_layers(model))
    assert experts < found["moved_bytes"] <= whole
    assert found["least_tpot_s"] == found["moved_bytes"] / 1e6
    assert "moves nothing here" in found["note"]
    for name, parameter in model.named_parameters():
        assert parameter.equal(weights[name]), name
    with experts_implementation(model, "grouped_mm"):
        assert decode_greedily(model, PROMPT_IDS, 4).tokens == truth.tokens


def test_more_memory_moves_less() -> None:
    model = tiny_model("qwen3_moe")
    whole = weight_bytes(model)
    moved = [
        measure_peer(model, PROMPT_IDS, memory=memory, new_tokens=2)["moved_bytes"]
        for memory in (whole * 9 // 10, whole // 2)
    ]
    assert moved[0] < moved[1]
