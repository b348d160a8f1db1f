from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expertcast.predictors import ExpertcastError
from expertcast.training.distill import distillation_loss, kl_divergence, sigmoid_kl, suited_loss
from tests.training.synthetic import tiny_view


def kl_reference(target_NE: torch.Tensor, forecast_NE: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """The divergence as it is defined, spelt out."""
    p_NE = torch.softmax(target_NE.float() / temperature, dim=-1)
    q_NE = torch.softmax(forecast_NE.float() / temperature, dim=-1)
    return temperature**2 * (p_NE * (p_NE / q_NE).log()).sum(dim=-1).mean()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), temperature=st.floats(0.3, 4.0))
def test_fast_kl_is_the_reference_and_zero_only_between_equals(seed: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    target, forecast = torch.randn(2, 7, 9, generator=generator)
    fast = kl_divergence(target, forecast, temperature)
    torch.testing.assert_close(fast, kl_reference(target, forecast, temperature), rtol=1e-3, atol=1e-6)
    assert fast > 0
    assert kl_divergence(target, target + 3.0, temperature) == pytest.approx(0.0, abs=1e-5)


def test_sigmoid_kl_sees_the_level_of_the_logits() -> None:
    target = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    assert sigmoid_kl(target, target) == pytest.approx(0.0, abs=1e-5)
    assert sigmoid_kl(target, target + 1.0) > 0.1
    p, q = torch.sigmoid(target), torch.sigmoid(target + 1.0)
    expected = (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).sum(1).mean()
    torch.testing.assert_close(sigmoid_kl(target, target + 1.0), expected)


def test_gradients_keep_their_size_at_high_temperature() -> None:
    target, forecast = torch.randn(2, 64, 16, generator=torch.Generator().manual_seed(0))
    sizes = []
    for temperature in (4.0, 16.0):
        leaf = forecast.clone().requires_grad_()
        kl_divergence(target, leaf, temperature).backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        sizes.append(float(leaf.grad.norm()))
    assert sizes[0] == pytest.approx(sizes[1], rel=0.2)


@pytest.mark.parametrize(("family", "loss"), [("qwen3_moe", "kl"), ("gpt_oss", "kl"), ("glm4_moe_lite", "sigmoid_kl")])
def test_loss_suits_the_routing_rule(family: str, loss: str) -> None:
    assert suited_loss(tiny_view(family)[0]) == loss


def test_unknown_loss_is_named() -> None:
    with pytest.raises(ExpertcastError, match=r"'mse'.*kl"):
        distillation_loss("mse", torch.zeros(1, 2), torch.zeros(1, 2))
