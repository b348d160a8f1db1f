"""Constants of the simulated device: launches are counted again, and sums agree with published measurements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks.shapes import SHAPES, random_model
from benchmarks.timed.costs import LAUNCHES, Launches, step_costs
from benchmarks.timed.routing import RECORDINGS
from benchmarks.timed.run import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig

from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.traced import TracedForecasts
from expertcast.predictors.base import RouterState
from expertcast.predictors.estimator import Estimator, EstimatorConfig

FAMILIES = {SHAPES[name].model_type: name for name in RECORDINGS}
ALLOCATE = {"empty", "empty_strided", "empty_like", "new_empty", "_unsafe_view", "lift_fresh", "detach"}
"""Operators that launch no kernel and are not marked as views."""


class Count(TorchDispatchMode):
    """Counts operators that launch a kernel, by part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.now = "after"
        self.counted: Counter[str] = Counter()

    def at(self, place: str) -> Callable[..., None]:
        return lambda *_args: setattr(self, "now", place)

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        if not func.is_view and func.overloadpacket.__name__ not in ALLOCATE:
            self.counted[self.now] += 1
        return func(*args, **(kwargs or {}))


def per_token(config: PretrainedConfig) -> Counter[str]:
    """Return the launches of one decode step of `generate` in bf16, by part, for all layers together."""
    model = random_model(config, dtype=torch.bfloat16, device="cpu", seed=0)
    model.set_experts_implementation("batched_mm")
    model.generation_config.eos_token_id = None
    count, layers = Count(), model.base_model.layers
    model.base_model.register_forward_pre_hook(count.at("before"))
    for layer, moe in zip(layers, find_moe_layers(model), strict=True):
        layer.register_forward_pre_hook(count.at("attention"))
        moe.experts.register_forward_pre_hook(count.at("experts"))
    layers[-1].register_forward_hook(count.at("after"))
    counted = []
    for tokens in (4, 5):
        count.counted = Counter()
        count.now = "after"
        ids = torch.zeros(1, 8, dtype=torch.int64)
        with count:
            model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
                max_new_tokens=tokens, min_new_tokens=tokens,
            )  # fmt: skip
        counted.append(count.counted)
    return counted[1] - counted[0]


def forecast_launches(name: str) -> int:
    view = find_moe_layers(tiny_model(name, 2))
    shape = view.shape
    forecasts = TracedForecasts(Estimator(EstimatorConfig(), shape).bind(view))
    hidden_TD, logits_TE = torch.randn(1, shape.hidden), torch.randn(1, shape.experts)
    ids_TK, weights_TK = view[0].route(logits_TE)
    state = RouterState(
        layer=0, residual_TD=hidden_TD, router_input_TD=hidden_TD, logits_TE=logits_TE, topk_ids_TK=ids_TK,
        topk_weights_TK=weights_TK, previous_logits_TLE=torch.randn(1, len(view), shape.experts),
    )  # fmt: skip
    count = Count()
    forecasts.prepare(view, 1)
    forecasts.forecast(state, 1)
    with count:
        forecasts.forecast(state, 1)
    return count.counted.total()


@pytest.mark.parametrize("family", LAUNCHES)
def test_launches_are_those_of_the_models(family: str) -> None:
    layers = 2
    counted = per_token(tiny_model(FAMILIES[family], layers).config)
    assert LAUNCHES[family] == Launches(
        attention=counted["attention"] // layers, experts=counted["experts"] // layers, before=counted["before"],
        after=counted["after"], forecast=forecast_launches(FAMILIES[family]),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "experts", "head"),
    [
        ("qwen3-30b-a3b", 6 * 3 * 2048 * 768, 2048 * 151936),
        ("gpt-oss-120b", 2 * (3 * 2880 * 2880 + 2 * 2880 + 2880), 2880 * 201088),
    ],
)
def test_weights_are_read_at_the_memory_s_rate(name: str, experts: int, head: int) -> None:
    costs = step_costs(name, kernel_s=0.0, memory_bandwidth=1e9)
    assert costs.experts_device_s == pytest.approx(3 * 2 * experts / 1e9)  # gathered, then multiplied
    assert costs.token_device_s == pytest.approx(2 * head / 1e9)
