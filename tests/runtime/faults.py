"""Helpers of the fault tests: a tiny model, its logits before, and whether it still gives them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from expertcast import OffloadedModel, offload
from expertcast.runtime.links.emulated import EmulatedLink
from tests.runtime.conftest import assert_same, greedy

INPUTS = {"input_ids": torch.tensor([[3, 4, 5, 9]])}
Result = tuple[Tensor, list[Tensor]]


def slow_link() -> EmulatedLink:
    return EmulatedLink(1e9, 2e-5, jitter=1e-4, seed=1)


def facts_of(model: nn.Module) -> list[Any]:
    """What an offload changes besides weights."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
    counts = [len(getattr(module, kind)) for module in model.modules() for kind in hooks]
    return [counts, model.get_experts_implementation(), [sorted(module.__dict__) for module in model.modules()]]  # type: ignore[operator]


@contextmanager
def still_right(model: PreTrainedModel, expected: Result, **configuration: Any) -> Iterator[OffloadedModel]:
    """Whatever the body does to the offloaded model, it gives the resident model's bits after it, open and closed."""
    facts, threads = facts_of(model), threading.active_count()
    configuration = {"slots": 5, "predictor": "next_norm", "forecasts": "always", "link": slow_link()} | configuration
    with offload(model, **configuration) as offloaded:
        yield offloaded
        assert_same(greedy(offloaded, INPUTS), expected)
    assert facts_of(model) == facts
    assert threading.active_count() == threads
    assert_same(greedy(model, INPUTS), expected)


class RaiseAt:
    """Raises at the n-th call of something."""

    def __init__(self, count: int, error: BaseException) -> None:
        self.count, self.error = count, error

    def __call__(self, *_args: Any, **_kwargs: Any) -> None:
        self.count -= 1
        if self.count == 0:
            raise self.error
