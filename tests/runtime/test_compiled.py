"""torch.compile around an offloaded model: its attention, norms and routers are compiled, the runtime is not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, StaticCache

from expertcast.runtime import offload
from tests.families.models import tiny_model


@pytest.fixture
def model() -> Iterator[PreTrainedModel]:
    yield tiny_model("qwen3_moe", torch.float32)
    torch.compiler.reset()  # type: ignore[no-untyped-call]


@torch.no_grad()
def _decode(model: PreTrainedModel, step: Callable[..., Any], tokens: int = 4) -> list[Tensor]:
    """Logits of greedy decode steps over a static cache, whose steps `generate` compiles on CUDA."""
    cache = StaticCache(config=copy.deepcopy(model.config), max_cache_len=32)
    ids, positions = torch.tensor([[3, 4, 5]]), torch.arange(3).unsqueeze(0)
    found, forward = [], model
    for _ in range(tokens):
        output = forward(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
        found.append(output.logits[0, -1].clone())
        ids, positions, forward = found[-1].argmax().view(1, 1), positions[:, -1:] + 1, step
    return found


def _compiled(model: PreTrainedModel) -> Callable[..., Any]:
    torch.compiler.reset()  # type: ignore[no-untyped-call]
    return torch.compile(model.forward, backend="eager", dynamic=False)


@pytest.mark.parametrize(("link", "mode"), [("instant", "exact"), ("kernel", "speculate")])
def test_compiled_steps_decode_the_same(model: PreTrainedModel, link: str, mode: str) -> None:
    """As steps that are not compiled, to rounding: attention is computed otherwise. In exact mode as the resident
    model's compiled steps, to the bit, for this backend adds no rounding of its own."""
    resident = _decode(model, _compiled(model)) if mode == "exact" else []
    with offload(model, link=link, slots=6, predictor="next_norm", mode=mode) as offloaded:
        expected = _decode(model, model)
        total = offloaded.stats.total
        offloaded.reset_stats()
        got = _decode(model, _compiled(model))
        assert offloaded.stats.total.requests == total.requests
        assert offloaded.stats.total.steps == total.steps
    for own, other in zip(got, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(own, other) for own, other in zip(got, resident, strict=mode == "exact"))
