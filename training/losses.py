"""Distillation losses between router logits and forecast logits.

N rows (tokens, or layers x tokens), E routed experts. Source: Speculating Experts, section 4 (row B13).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from expertcast.predictors import ExpertcastError, MoELayer


def kl_divergence(target_NE: Tensor, forecast_NE: Tensor, temperature: float = 1.0) -> Tensor:
    """Mean over rows of T^2 KL(softmax(target / T) || softmax(forecast / T)), T the temperature, in log space.

    The factor keeps gradients at one size for any temperature.
    """
    log_p_NE = functional.log_softmax(target_NE.float() / temperature, dim=-1)
    log_q_NE = functional.log_softmax(forecast_NE.float() / temperature, dim=-1)
    divergence_NE = functional.kl_div(log_q_NE, log_p_NE, log_target=True, reduction="none")
    return temperature**2 * divergence_NE.sum(dim=-1).mean()


def sigmoid_kl(target_NE: Tensor, forecast_NE: Tensor, temperature: float = 1.0) -> Tensor:
    """Mean over rows of the experts' Bernoulli KL divergences, for routers that score experts one by one.

    A sigmoid router's choice depends on the level of its logits, which the softmax of :func:`kl_divergence` removes.
    """
    target_NE, forecast_NE = target_NE.float() / temperature, forecast_NE.float() / temperature
    p_NE = torch.sigmoid(target_NE)
    cross_NE = functional.binary_cross_entropy_with_logits(forecast_NE, p_NE, reduction="none")
    entropy_NE = functional.binary_cross_entropy_with_logits(target_NE, p_NE, reduction="none")
    return temperature**2 * (cross_NE - entropy_NE).sum(dim=-1).mean()


LOSSES = {"kl": kl_divergence, "sigmoid_kl": sigmoid_kl}


def distillation_loss(name: str, target_NE: Tensor, forecast_NE: Tensor, temperature: float = 1.0) -> Tensor:
    """The loss registered as `name`, of `forecast_NE` from `target_NE`, both divided by the `temperature`.

    Raises:
        ExpertcastError: unknown name.
    """
    if name not in LOSSES:
        raise ExpertcastError(f"unknown loss {name!r}: choose from {', '.join(LOSSES)}")
    return LOSSES[name](target_NE, forecast_NE, temperature)


def suited_loss(layer: MoELayer) -> str:
    """`kl` when adding a constant to all logits leaves the layer's routing as it is, else `sigmoid_kl`."""
    generator = torch.Generator().manual_seed(0)
    logits_TE = torch.randn(64, layer.num_experts, generator=generator)
    weight = next(layer.router.parameters())
    logits_TE = logits_TE.to(weight.device)
    ids_TK, weights_TK = layer.route(logits_TE)
    shifted_ids_TK, shifted_weights_TK = layer.route(logits_TE + 2.0)
    same = torch.equal(ids_TK, shifted_ids_TK) and torch.allclose(weights_TK, shifted_weights_TK, rtol=0.05, atol=1e-2)
    return "kl" if same else "sigmoid_kl"
