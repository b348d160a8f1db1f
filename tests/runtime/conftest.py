"""Fixtures of the runtime tests: prompts, and greedy decoding with logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast.checkpoints.bundled import REFERENCE
from expertcast.data.models import load_model
from expertcast.predictors import ExpertcastError

PROMPT = "The old man went down to the river and"
PROMPTS = [PROMPT, "To be, or not to be,", "In the beginning", "Let x be a natural number such that x is even. Then"]


@pytest.fixture(scope="session")
def reference_fp32() -> PreTrainedModel:
    return load_model(REFERENCE, dtype="fp32")


@pytest.fixture(scope="session")
def one(reference_tokenizer: Any) -> dict[str, Tensor]:
    return dict(reference_tokenizer(PROMPT, return_tensors="pt"))


@pytest.fixture(scope="session")
def four(reference_tokenizer: Any) -> dict[str, Tensor]:
    """Four prompts of different length, padded on the left."""
    side, reference_tokenizer.padding_side = reference_tokenizer.padding_side, "left"
    try:
        batch = dict(reference_tokenizer(PROMPTS, return_tensors="pt", padding=True))
    finally:
        reference_tokenizer.padding_side = side
    assert not batch["attention_mask"].all()
    return batch


@contextmanager
def refused(line: str) -> Iterator[None]:
    """What is done inside raises an :class:`ExpertcastError` of one line that matches this expression."""
    with pytest.raises(ExpertcastError, match=line) as caught:
        yield
    assert "\n" not in str(caught.value)


def greedy(model: Any, inputs: dict[str, Tensor], tokens: int = 8) -> tuple[Tensor, list[Tensor]]:
    """Sequences and the logits of every step."""
    output = model.generate(
        **inputs, max_new_tokens=tokens, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    return output.sequences, list(output.logits)


def assert_same(got: tuple[Tensor, list[Tensor]], expected: tuple[Tensor, list[Tensor]]) -> None:
    """Same tokens and bit-equal logits."""
    assert torch.equal(got[0], expected[0])
    assert len(got[1]) == len(expected[1])
    for own, other in zip(got[1], expected[1], strict=True):
        assert torch.equal(own, other)
