"""Whole models on a real device: the resident model's bits over every link, and no expert with another's weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward

from expertcast import offload
from expertcast.data.moe_layers import find_moe_layers
from expertcast.runtime.engine.kernels import _MOST_GROUPS, SlotKernel, _SlotRanges, has_persistent_grouped_mm
from tests.runtime.conftest import assert_same, greedy
from tests.runtime.links.cuda_helpers import MARKS, cuda_model, prompt

pytestmark = MARKS

LINKS = ["cuda", "auto"]
CONFIGURATIONS: list[dict[str, Any]] = [
    {"slots": 2},
    {"slots": 5, "predictor": "next_norm"},
    {"slots": 12, "predictor": "next_norm", "policies": "prefetch=top_k:overfetch=2.0"},
    {"cache": False},
    {"cache": False, "predictor": "next_norm"},
]
WATCHED: list[dict[str, Any]] = [
    {"slots": 2},
    {"slots": 5, "predictor": "next_norm", "forecasts": "always"},
    {"slots": 9, "predictor": "next_norm", "policies": "prefetch=top_k:overfetch=2.0", "forecasts": "always"},
    {"slots": 6, "predictor": "router_input", "cache": False, "forecasts": "always"},
    {"slots": 7, "predictor": "next_norm", "mode": "speculate", "forecasts": "always"},
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


def _canary_model() -> PreTrainedModel:
    """Every expert's weights are its own number."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
        num_experts=16, num_experts_per_tok=2, moe_intermediate_size=16, intermediate_size=32,
        initializer_range=0.3, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).float().eval()
    for layer in find_moe_layers(model):
        values = torch.arange(16).float().view(-1, 1, 1) + layer.index * 1000
        layer.experts.gate_up_proj.data[:] = values
        layer.experts.down_proj.data[:] = values
    return model


@pytest.mark.parametrize("link", LINKS[:2])
@pytest.mark.parametrize("configuration", WATCHED)
def test_canaries(link: str, configuration: dict[str, Any]) -> None:
    """No expert computes with another's weights. Nothing waits for the device between steps: it counts the errors."""
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


# torch's own `grouped_mm` on a CUDA device: the same bits over slots as over experts, with no value asked for


EXPERTS = 8


@pytest.fixture(autouse=True)
def _native() -> None:
    if not has_persistent_grouped_mm(torch.empty(0, dtype=torch.bfloat16, device="cuda")):
        pytest.skip("torch has no kernel of grouped_mm for this device")


def _factors(rows: int, inner: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [P, D] by expert, weights [E, D, F] and each row's expert [P]."""
    torch.manual_seed(0)
    rows_PD = torch.randn(rows, inner, device="cuda").bfloat16()
    weight_EDF = torch.randn(EXPERTS, columns, inner, device="cuda").bfloat16().transpose(1, 2)
    return rows_PD, weight_EDF, torch.randint(EXPERTS, (rows,), device="cuda").sort().values


def _in_slots(weight_EDF: Tensor, expert_P: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """The experts in slots far apart, the first and the last among them, and where each slot's rows end."""
    slot_of_E = torch.linspace(0, slots - 1, EXPERTS, device="cuda").long()
    weight_SFD = weight_EDF.new_empty(slots, weight_EDF.shape[2], weight_EDF.shape[1])
    weight_SFD[slot_of_E] = weight_EDF.transpose(1, 2)
    return weight_SFD.transpose(1, 2), _ends(slot_of_E[expert_P], slots)


def _ends(group_P: Tensor, groups: int) -> Tensor:
    return torch.bincount(group_P, minlength=groups).cumsum(0).int()


@pytest.mark.parametrize(("inner", "columns"), [(2048, 1536), (2880, 2880), (768, 2048)])
def test_both_tiles_make_the_same_bits(inner: int, columns: int) -> None:
    rows_PD, weight_EDF, expert_P = _factors(EXPERTS * 200, inner, columns)
    expected = functional.grouped_mm(rows_PD, weight_EDF, offs=_ends(expert_P, EXPERTS))
    weight_SDF, ends_S = _in_slots(weight_EDF, expert_P, 100)
    assert len(rows_PD) // EXPERTS > 128 >= len(rows_PD) // 100
    assert torch.equal(functional.grouped_mm(rows_PD, weight_SDF, offs=ends_S), expected)


@pytest.mark.parametrize("rows", [8, 1600])
def test_ranges(rows: int) -> None:
    rows_PD, weight_EDF, expert_P = _factors(rows, 256, 256)
    expected = functional.grouped_mm(rows_PD, weight_EDF, offs=_ends(expert_P, EXPERTS))
    for slots in (_MOST_GROUPS, _MOST_GROUPS + 1, 3000):
        weight_SDF, ends_S = _in_slots(weight_EDF, expert_P, slots)
        with _SlotRanges():
            found = functional.grouped_mm(rows_PD, weight_SDF, offs=ends_S)
        assert torch.equal(found, expected)


@torch.no_grad()
def test_many_slots_in_a_graph() -> None:
    slots = 2500
    experts = find_moe_layers(cuda_model())[0].experts
    hidden_TD = torch.randn(2, 32, device="cuda").bfloat16()
    ids_TK = torch.tensor([[3, 1], [7, 3]], device="cuda")
    weights_TK = torch.rand(2, 2, device="cuda").bfloat16()
    expected = grouped_mm_experts_forward(experts, hidden_TD, ids_TK, weights_TK)
    slot_of_E = torch.linspace(0, slots - 1, EXPERTS, device="cuda").long()
    for name, parameter in experts.named_parameters(recurse=False):
        views = parameter.new_empty(slots, *parameter.shape[1:])
        views[slot_of_E] = parameter
        experts._parameters[name] = torch.nn.Parameter(views, requires_grad=False)
    kernel, graph = SlotKernel(grouped_mm_experts_forward), torch.cuda.CUDAGraph()
    assert torch.equal(kernel.run(experts, hidden_TD, slot_of_E[ids_TK], weights_TK, ids_TK), expected)
    slots_TK = slot_of_E[ids_TK]
    with torch.cuda.graph(graph):
        output_TD = kernel.run(experts, hidden_TD, slots_TK, weights_TK, ids_TK)
    graph.replay()
    assert torch.equal(output_TD, expected)
