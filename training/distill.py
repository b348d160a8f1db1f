"""Distilling routers into the estimator's network with Lightning, and the losses for it.

T tokens, P layer pairs, F features, E routed experts, N rows (tokens, or layers x tokens). Source of the losses:
Speculating Experts, section 4 (row B13).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from expertcast.data.batch import TraceBatch
from expertcast.data.distributed import training_share
from expertcast.data.traces import TraceSource
from expertcast.predictors import ExpertcastError, MoELayer
from expertcast.predictors.estimator import Estimator
from expertcast.predictors.plain import Json
from expertcast.training.metrics.means import Recall
from expertcast.training.network_training import NetworkTraining, TrainingData
from expertcast.training.options import FitOptions
from expertcast.training.scoring import forget_some, states_of, validation_batches


class Distiller(NetworkTraining):
    """Trains one distance of an estimator: its network moves, everything else stands still.

    Logs `loss` per step, and per validation round `recall` and `recall_per_layer/<target layer>`.
    """

    def __init__(
        self, estimator: Estimator, ahead: int, *, loss: str, temperature: float, scale_P: Tensor, steps: int
    ) -> None:
        """
        Args:
            estimator: what the network is a part of; bound, its standardisation and ridge maps set.
            ahead: the distance.
            loss: name of the loss, one of `LOSSES`.
            temperature: what the loss divides logits by.
            scale_P: per pair, what logits are divided by before the loss (1 leaves them as they are).
            steps: optimiser steps of the schedule.
        """
        super().__init__(estimator.network(ahead), estimator.config, steps)
        self._estimator = [estimator]  # in a list: only the network is trained, synchronised and moved
        self._ahead, self._loss, self._temperature = ahead, loss, temperature
        self.register_buffer("scale_P", scale_P.clone())
        # validation runs in full on every rank: summing over ranks would count each token twice
        self.recall = Recall(len(scale_P), sync_on_compute=False)

    def identity(self) -> Json:
        return super().identity() | {"ahead": self._ahead, "loss": self._loss, "temperature": self._temperature}

    def forecast(self, batch: TraceBatch) -> tuple[Tensor, Tensor]:
        """The routers' logits [P, T, E] of a batch and those forecast, base and network together."""
        estimator, ahead = self._estimator[0], self._ahead
        with torch.no_grad():
            states = states_of(estimator.view, forget_some(batch) if self.training else batch)
            x_PTF = torch.stack([estimator.features(state, ahead) for state in states[: len(self.scale_P)]])
            y_PTE = batch.logits_TLE[:, ahead:].transpose(0, 1).float().to(x_PTF.device)
            x_PTF = estimator.standardised(x_PTF, ahead)
        return y_PTE, estimator.base(x_PTF, ahead) + self.scale_P[:, None, None] * self.network(x_PTF).float()

    def training_step(self, batch: TraceBatch, batch_index: int) -> Tensor:
        """The loss of one step."""
        y_PTE, z_PTE = self.forecast(batch)
        scale_P11 = self.scale_P[:, None, None]
        loss = distillation_loss(self._loss, y_PTE / scale_P11, z_PTE / scale_P11, self._temperature)
        self.log("loss", loss, batch_size=len(batch))
        return loss

    def validation_step(self, batch: TraceBatch, batch_index: int) -> None:
        """Score one batch of the round."""
        y_PTE, z_PTE = self.forecast(batch)
        for pair, layer in enumerate(self._estimator[0].view.layers[self._ahead :]):
            self.recall.update(pair, layer.route(z_PTE[pair])[0], layer.route(y_PTE[pair])[0])

    def on_validation_epoch_end(self) -> None:
        """End the round with its score."""
        recall_P = self.recall.per_row().float()
        self.recall.reset()
        for pair, value in enumerate(recall_P):
            self.log(f"recall_per_layer/{pair + self._ahead}", value)
        self.end_round(float(recall_P.mean()))


def distillation_data(source: TraceSource, options: FitOptions, step_tokens: int) -> TrainingData[TraceBatch]:
    """Batches of `step_tokens` tokens: train shuffled anew in every pass, validation in full on every rank."""

    def passing(epoch: int, generator: torch.Generator) -> Iterator[TraceBatch]:
        seed, share = options.seed + epoch, training_share()  # the source draws an order from a number
        return source.batches("train", step_tokens, shuffle=True, seed=seed, max_tokens=options.tokens, share=share)

    return TrainingData(passing, lambda: validation_batches(source, options, step_tokens), options.seed)


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
