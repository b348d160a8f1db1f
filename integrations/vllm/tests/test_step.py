"""Whose tokens a forward is over, by what vLLM's attention backends say, and rows of padding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expertcast_vllm.step import Step, running_step, without_padding
from vllm.forward_context import ForwardContext, override_forward_context

from expertcast.predictors.messages import ExpertcastError


def during(metadata: dict[str, Any] | None, padding: torch.Tensor | None = None) -> Any:
    context = ForwardContext(no_compile_layers={}, attn_metadata=metadata, slot_mapping={}, is_padding=padding)  # type: ignore[arg-type]
    return override_forward_context(context)


def flash(starts: list[int], longest: int) -> Any:
    return SimpleNamespace(
        num_actual_tokens=starts[-1], query_start_loc=torch.tensor(starts), max_query_len=longest
    )  # fmt: skip


def flash_infer(decodes: int, prefills: int, tokens: int) -> Any:
    return SimpleNamespace(
        num_actual_tokens=decodes + tokens, num_decodes=decodes, num_decode_tokens=decodes, num_prefills=prefills
    )  # fmt: skip


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (flash([0, 1, 2, 3], 1), Step(tokens=3, requests=3, decodes=True)),
        (flash([0, 1, 6], 5), Step(tokens=6, requests=2, decodes=False)),
        (flash_infer(3, 0, 0), Step(tokens=3, requests=3, decodes=True)),
        (flash_infer(1, 1, 5), Step(tokens=6, requests=2, decodes=False)),
    ],
)
def test_what_backends_say(metadata: Any, expected: Step) -> None:
    with during({"layer": metadata}):
        assert running_step() == expected
    silent = SimpleNamespace(num_actual_tokens=0, query_start_loc=None)
    with during({"convolution": silent, "layer": metadata}):
        assert running_step() == expected


def test_trial_runs_are_over_nobodys_tokens() -> None:
    assert running_step() is None
    with during(None):
        assert running_step() is None


def test_a_backend_that_says_nothing_is_refused() -> None:
    with during({"layer": SimpleNamespace(block_table=1)}), pytest.raises(ExpertcastError, match="SimpleNamespace"):
        running_step()


def test_padding_is_the_first_row_again() -> None:
    rows = torch.arange(8).view(4, 2)
    with during({}, torch.tensor([False, False, True, True, True])):
        assert without_padding(rows).tolist() == [[0, 1], [2, 3], [0, 1], [0, 1]]
    with during({}):
        assert without_padding(rows) is rows
