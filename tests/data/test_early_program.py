"""Blocks that run early as traced programs: the blocks' own bits, and blocks themselves where a trace would not do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from expertcast.data.early import _CHECKED
from expertcast.data.moe_layers import find_moe_layers
from tests.data.early_oracle import Follower, random_stand_in
from tests.families.models import tiny_model

PROMPT, STEPS = 9, 12
"""gpt_oss's window of 16 tokens is passed on the way."""


def decoded(model: PreTrainedModel, *, programs: bool) -> tuple[list[list[Tensor | None]], Follower]:
    """What early attention gave in decode steps, by step and source layer."""
    view = find_moe_layers(model)
    follower = Follower(model, view, random_stand_in(view))
    for program in () if programs else follower.early._programs:
        program.run = lambda _hidden, _call, own: own()  # type: ignore[method-assign]
    given = torch.randint(3, 4096, (2, PROMPT + STEPS), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        cache = model.base_model(input_ids=given[:, :PROMPT], use_cache=True).past_key_values
    steps = [follower.run(input_ids=token, past_key_values=cache) for token in given[:, PROMPT:].split(1, dim=1)]
    return steps, follower


def assert_same(found: list[list[Tensor | None]], expected: list[list[Tensor | None]]) -> None:
    for one, other in zip(found, expected, strict=True):
        for first, second in zip(one, other, strict=True):
            assert (first is None) == (second is None)
            assert first is None or second is None or torch.equal(first, second)


def runs(follower: Follower) -> list[list[bool]]:
    """By layer that can be run early, whether each of its programs is in use."""
    programs = follower.early._programs[1:]
    return [[made.run is not None and made.calls > _CHECKED for made in each._made.values()] for each in programs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v2", "glm4_moe_lite"])
def test_a_program_gives_the_blocks_own_bits(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family, dtype)
    expected, _ = decoded(model, programs=False)
    found, follower = decoded(model, programs=True)
    assert_same(found, expected)
    assert runs(follower) == [[] if each is None else [True] for each in found[-1]]


def _branching(attention: nn.Module) -> None:
    """It goes by the length of the text, from the ninth step on."""
    own = attention.forward

    def forward(*args: Any, past_key_values: Cache | None = None, **kwargs: Any) -> Any:
        output, *rest = own(*args, past_key_values=past_key_values, **kwargs)
        held = 0 if past_key_values is None else past_key_values.layers[attention.layer_idx].keys.shape[-2]
        return (output * 2 if held > PROMPT + 8 else output, *rest)

    attention.forward = forward


def _counting(attention: nn.Module) -> None:
    """It goes by what it has itself, another thing in each step."""
    own = attention.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output, *rest = own(*args, **kwargs)
        return (output * attention.scale, *rest)

    attention.forward, attention.scale = forward, 1.0


@pytest.mark.parametrize("change", [_branching, _counting])
def test_a_block_that_no_trace_would_follow_runs_itself(change: Callable[[nn.Module], None]) -> None:
    model = tiny_model("qwen3_moe")
    attention = find_moe_layers(model)[2].decoder.self_attn
    change(attention)

    def run(**kwargs: bool) -> tuple[list[list[Tensor | None]], Follower]:
        attention.scale = 1.0
        handle = model.base_model.register_forward_pre_hook(lambda *_: setattr(attention, "scale", attention.scale + 1))
        try:
            return decoded(model, **kwargs)
        finally:
            handle.remove()

    expected, _ = run(programs=False)
    found, follower = run(programs=True)
    assert_same(found, expected)
    assert runs(follower) == [[True], [False], [True]]
