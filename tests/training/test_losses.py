from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expertcast.predictors.estimator import Estimator, EstimatorConfig
from expertcast.predictors.view import MoEView
from expertcast.training.estimator import LOSSES, Distiller, boundary_weight, suited_loss
from tests.training.synthetic import random_batch, tiny_view


@pytest.mark.parametrize("loss", ["kl", "sigmoid_kl"])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_weighted_losses_by_their_definition(loss: str, seed: int) -> None:
    """Each expert's part is at least 0 and 0 only between equals, so that every weight pulls in the same direction."""
    generator = torch.Generator().manual_seed(seed)
    target, forecast = torch.randn(2, 7, 9, generator=generator, dtype=torch.float64)
    weight = torch.rand(7, 9, generator=generator, dtype=torch.float64)
    if loss == "kl":
        p, q = (each.softmax(-1) for each in (target, forecast))
        parts = p * (p / q).log() - p + q
    else:
        p, q = (each.sigmoid() for each in (target, forecast))
        parts = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    assert (parts >= -1e-12).all()
    expected = (weight * parts).sum(-1).mean()
    found = LOSSES[loss](target, forecast, weight)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-5)
    assert LOSSES[loss](target, target, weight) == pytest.approx(0.0, abs=1e-5)


def test_weights_are_largest_at_the_boundary() -> None:
    """K = 2: the boundary is at 1, between 2 and 0."""
    weight_NE = boundary_weight(torch.tensor([[0.0, 3.0, 1.0 - 9.0, 2.0]]), 2)
    expected = [0.3 + math.exp(-2), 0.3 + math.exp(-8), 0.3, 0.3 + math.exp(-2)]
    assert weight_NE.tolist() == [pytest.approx(expected, abs=1e-6)]
    assert boundary_weight(torch.randn(3, 4), 4).tolist() == [[1.0] * 4] * 3


@pytest.mark.parametrize("loss", ["kl", "sigmoid_kl"])
def test_a_step_of_training_goes_from_the_router_to_the_estimator(loss: str) -> None:
    """The loss of a training step equals its definition with the router's logits as target."""
    view = tiny_view()
    shape = view.shape
    config = EstimatorConfig(inputs=["quasi_hidden"], width=16)
    estimator = Estimator(config, shape)
    estimator.bind(view)
    pairs, features = shape.layers - 1, sum(estimator.sizes)
    scale_P = torch.linspace(0.5, 1.5, pairs)
    scales = scale_P, torch.zeros(pairs, features), torch.ones(pairs, features)
    network = estimator.network(1)
    torch.nn.init.normal_(network.head_PWE)
    distiller = Distiller(estimator, network, 1, config, loss=loss, steps=1, scales=scales)
    distiller.log = lambda *args, **kwargs: None  # there is no trainer
    batch = random_batch(view, 12)
    router_PTE, base_PTE, made_PTE = distiller.forecast(batch)
    assert torch.equal(router_PTE, batch.logits_TLE[:, 1:].transpose(0, 1))
    p = router_PTE / scale_P[:, None, None]
    q = (base_PTE + made_PTE) / scale_P[:, None, None]
    expected = LOSSES[loss](p, q, boundary_weight(p, shape.top_k))
    assert expected > 0
    distiller.eval()  # in training every tenth token forgets the one before it
    torch.testing.assert_close(distiller.training_step(batch, 0), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("family", "loss"), [("qwen3_moe", "kl"), ("gpt_oss", "kl"), ("glm4_moe_lite", "sigmoid_kl")])
def test_loss_suits_the_routing_rule(family: str, loss: str) -> None:
    assert suited_loss(tiny_view(family)[0]) == loss


def test_rounding_in_bf16_makes_no_sigmoid_router(reference_view: MoEView) -> None:
    """The bundled model's routers choose other experts for 1 in 37 shifted logits, by ties."""
    assert {suited_loss(layer) for layer in reference_view} == {"kl"}
