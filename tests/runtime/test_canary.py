"""No expert ever computes with another's weights, or with half of its own.

Every weight of expert e of layer l is l * 1000 + e, in fp32, so that the output of an expert tells whose weights made
it. Each call of an experts module is compared, bit for bit, with the untouched weights; then its output is
replaced by zeros, so that the routing stays as random as the tokens.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import grouped_mm_experts_forward

from expertcast.data.moe_layers import find_moe_layers
from expertcast.runtime import EmulatedLink, OffloadedModel, offload
from expertcast.runtime.storage.transfer import Transfer

EXPERTS = 16


def _canary_model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
        num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=16, intermediate_size=32,
        initializer_range=0.3, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).float().eval()
    for layer in find_moe_layers(model):
        values = torch.arange(EXPERTS).float().view(-1, 1, 1) + layer.index * 1000
        layer.experts.gate_up_proj.data[:] = values
        layer.experts.down_proj.data[:] = values
    return model


class _Watch:
    """Compares every output with the canaries' own and counts."""

    def __init__(self, offloaded: OffloadedModel, canaries: dict[int, nn.Module]) -> None:
        self.steps = 0
        self.wrong = 0
        for layer in offloaded.view:
            layer.experts.register_forward_hook(self._hook(canaries[layer.index]))

    def _hook(self, canary: nn.Module) -> Any:
        def hook(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            self.steps += 1
            self.wrong += not torch.equal(output, grouped_mm_experts_forward(canary, *args))
            return torch.zeros_like(output)

        return hook


def _drive(link: EmulatedLink, *, forwards: int, **configuration: Any) -> _Watch:
    model = _canary_model()
    canaries = {layer.index: copy.deepcopy(layer.experts) for layer in find_moe_layers(model)}
    generator = torch.Generator().manual_seed(1)
    with offload(model, link=link, **configuration) as offloaded, torch.no_grad():
        watch = _Watch(offloaded, canaries)
        for step in range(forwards):
            batch = 4 if step % 10 == 9 else 1
            offloaded(input_ids=torch.randint(512, (batch, 1), generator=generator), use_cache=False)
        total = offloaded.stats.total
        assert total.bytes_moved >= link.bytes_moved - 8 * offloaded.pool.layout.block_bytes
        if "predictor" in configuration:
            assert total.prefetched_used >= total.prefetched_in_time > 0  # how many come late is the machine's affair
    return watch


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
def test_canaries(configuration: dict[str, Any]) -> None:
    watch = _drive(EmulatedLink(1e12, jitter=4e-4, seed=3), forwards=250, **configuration)
    assert watch.steps == 1000
    assert watch.wrong == 0


class _HastyLink(EmulatedLink):
    """Lets compute go on before a copy has arrived."""

    def wait(self, copy: Transfer) -> None:
        if not copy.started:
            super().wait(copy)
        copy.error = None


def test_canaries_would_be_seen() -> None:
    """The same run with a link that does not wait: the test above can fail."""
    link = _HastyLink(1e12, jitter=4e-3, seed=3)
    model = _canary_model()
    canaries = {layer.index: copy.deepcopy(layer.experts) for layer in find_moe_layers(model)}
    with offload(model, link=link, slots=64) as offloaded, torch.no_grad():
        watch = _Watch(offloaded, canaries)
        for token in range(10):
            offloaded(input_ids=torch.tensor([[token]]), use_cache=False)
    assert watch.wrong > 0
