"""Distilling routers into the estimator's network with Lightning.

T tokens, P layer pairs, F features, E routed experts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from expertcast.data.batch import TraceBatch
from expertcast.data.distributed import training_share
from expertcast.data.traces import TraceSource
from expertcast.predictors.estimator import Estimator
from expertcast.predictors.plain import Json
from expertcast.training.losses import distillation_loss
from expertcast.training.metrics.means import Recall
from expertcast.training.network_training import NetworkTraining, TrainingData
from expertcast.training.options import FitOptions
from expertcast.training.scoring import forget_some, states_of, validation_batches


class Distiller(NetworkTraining):
    """Trains one distance of an estimator: its network moves, everything else stands still.

    Logs `loss` per step, and per validation round `recall` and `recall_per_layer/<target layer>`.
    """

    def __init__(
        self,
        estimator: Estimator,
        source: TraceSource,
        ahead: int,
        *,
        loss: str,
        temperature: float,
        scale_P: Tensor,
        steps: int,
    ) -> None:
        """
        Args:
            estimator: what the network is a part of, its standardisation and ridge maps set.
            source: its view routes.
            ahead: the distance.
            loss: name of the loss, see :mod:`expertcast.training.losses`.
            temperature: what the loss divides logits by.
            scale_P: per pair, what logits are divided by before the loss (1 leaves them as they are).
            steps: optimiser steps of the schedule.
        """
        super().__init__(estimator.network(ahead), estimator.config, steps)
        self._estimator = [estimator]  # in a list: only the network is trained, synchronised and moved
        self._source, self._ahead, self._loss, self._temperature = source, ahead, loss, temperature
        self.register_buffer("scale_P", scale_P.clone())
        # validation runs in full on every rank: summing over ranks would count each token twice
        self.recall = Recall(len(scale_P), sync_on_compute=False)

    def identity(self) -> Json:
        return super().identity() | {"ahead": self._ahead, "loss": self._loss, "temperature": self._temperature}

    def forecast(self, batch: TraceBatch) -> tuple[Tensor, Tensor]:
        """The routers' logits [P, T, E] of a batch and those forecast, base and network together."""
        estimator, ahead = self._estimator[0], self._ahead
        with torch.no_grad():
            states = states_of(self._source.view, forget_some(batch) if self.training else batch)
            x_PTF = torch.stack([estimator.features(state, ahead) for state in states[: len(self.scale_P)]])
            y_PTE = batch.logits_TLE[:, ahead:].transpose(0, 1).float().to(x_PTF.device)
            x_PTF = estimator.standardised(x_PTF, ahead)
        return y_PTE, estimator.base(x_PTF, ahead) + self.scale_P[:, None, None] * self.network(x_PTF).float()

    def training_step(self, batch: TraceBatch, batch_index: int) -> Tensor:
        """The loss of one step."""
        del batch_index
        y_PTE, z_PTE = self.forecast(batch)
        scale_P11 = self.scale_P[:, None, None]
        loss = distillation_loss(self._loss, y_PTE / scale_P11, z_PTE / scale_P11, self._temperature)
        self.log("loss", loss, batch_size=len(batch))
        return loss

    def validation_step(self, batch: TraceBatch, batch_index: int) -> None:
        """Score one batch of the round."""
        del batch_index
        y_PTE, z_PTE = self.forecast(batch)
        for pair, layer in enumerate(self._source.view.layers[self._ahead :]):
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
        del generator  # the source draws an order from a number
        seed, share = options.seed + epoch, training_share()
        return source.batches("train", step_tokens, shuffle=True, seed=seed, max_tokens=options.tokens, share=share)

    return TrainingData(passing, lambda: validation_batches(source, options, step_tokens), options.seed)
