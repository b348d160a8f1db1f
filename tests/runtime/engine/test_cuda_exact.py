"""Whole models on a real device: the resident model's bits over every link, and no expert with another's weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.moe import batched_mm_experts_forward

from expertcast.data.moe_layers import find_moe_layers
from expertcast.runtime import offload
from expertcast.runtime.experimental.kernel_link import has_triton
from tests.runtime.conftest import assert_same, greedy
from tests.runtime.links.cuda_helpers import MARKS, cuda_model, prompt
from tests.runtime.test_canary import _canary_model

pytestmark = MARKS

LINKS = ["cuda", pytest.param("kernel", marks=pytest.mark.skipif(not has_triton(), reason="no triton")), "auto"]
CONFIGURATIONS: list[dict[str, Any]] = [
    {"slots": 2},
    {"slots": 5, "predictor": "next_norm"},
    {"slots": 12, "predictor": "next_norm", "overfetch": 2.0},
    {"cache": False},
    {"cache": False, "predictor": "next_norm"},
]


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral", "glm4_moe_lite"])
def test_exact_generation(link: str, family: str) -> None:
    model, inputs = cuda_model(family), prompt(3, 4, 5, 6, 7)
    expected = greedy(model, inputs, 12)
    for configuration in CONFIGURATIONS:
        with offload(model, link=link, **configuration) as offloaded:
            assert_same(greedy(offloaded, inputs, 12), expected)
            assert offloaded.stats.total.misses > 0
    assert_same(greedy(model, inputs, 12), expected)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_both_kernels_on_the_reference_model(implementation: str) -> None:
    """Rows of a group are computed alike wherever the group's weights lie."""
    from expertcast.checkpoints.bundled import REFERENCE
    from expertcast.data.models import load_model

    model, inputs = load_model(REFERENCE, device="cuda"), prompt(3, 4, 5, 6, 7)
    model.set_experts_implementation(implementation)
    expected = greedy(model, inputs, 12)
    with offload(model, link="cuda", slots=96, predictor="next_norm") as offloaded:
        assert_same(greedy(offloaded, inputs, 12), expected)


@pytest.mark.parametrize("link", LINKS[:2])
@pytest.mark.parametrize(
    "configuration",
    [
        {"slots": 2},
        {"slots": 5, "predictor": "next_norm"},
        {"slots": 9, "predictor": "next_norm", "overfetch": 2.0},
        {"slots": 6, "predictor": "router_input", "cache": False},
        {"slots": 7, "predictor": "next_norm", "mode": "speculate"},
    ],
)
def test_canaries(link: str, configuration: dict[str, Any]) -> None:
    """As test_canary.py, without a host synchronisation between steps: errors are counted on the device."""
    model = _canary_model()
    model.to("cuda")
    model.set_experts_implementation("batched_mm")
    canaries = {layer.index: copy.deepcopy(layer.experts) for layer in find_moe_layers(model)}
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    generator = torch.Generator().manual_seed(1)

    def watch(canary: nn.Module) -> Any:
        def hook(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            wrong.add_((output != batched_mm_experts_forward(canary, *args)).any())
            return torch.zeros_like(output)

        return hook

    with offload(model, link=link, **configuration) as offloaded, torch.no_grad():
        for layer in offloaded.view:
            layer.experts.register_forward_hook(watch(canaries[layer.index]))
        for step in range(250):
            batch = 4 if step % 10 == 9 else 1
            ids = torch.randint(512, (batch, 1), generator=generator).to("cuda")
            offloaded(input_ids=ids, use_cache=False)
            if step % 7 == 0:
                torch.cuda._sleep(1_000_000)  # the host runs ahead
        assert offloaded.stats.total.bytes_moved > 0
    assert int(wrong) == 0
