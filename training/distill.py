"""Distilling routers into the estimator's network with Lightning.

T tokens, P layer pairs, F features, E routed experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import lightning
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torchmetrics import Metric

from expertcast.data.batch import TraceBatch
from expertcast.data.traces import TraceSource
from expertcast.predictors.estimator import Estimator
from expertcast.training.losses import distillation_loss
from expertcast.training.scoring import forget_some, states_of, token_recall

WARM_UP = 0.05
FLOOR = 0.02
"""Learning rate at the end, as a share of the peak."""


class LayerRecall(Metric):  # type: ignore[misc]
    """Recall@k [P] per layer pair from the scores of single tokens."""

    full_state_update = False
    higher_is_better = True
    total_P: Tensor
    count_P: Tensor

    def __init__(self, pairs: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("total_P", default=torch.zeros(pairs, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count_P", default=torch.zeros(pairs, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, pair: int, score_T: Tensor) -> None:
        """Add tokens' recalls at one pair."""
        self.total_P[pair] += score_T.sum(dtype=torch.float64)
        self.count_P[pair] += len(score_T)

    def compute(self) -> Tensor:
        return (self.total_P / self.count_P.clamp(min=1)).float()


@dataclass(kw_only=True)
class BestState:
    """The network as it was at its best validation round."""

    recall: float = -1.0
    step: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)


class Distiller(lightning.LightningModule):  # type: ignore[misc]
    """Trains one distance of an estimator: its network moves, everything else stands still.

    Logs `loss` per step, and per validation round `recall` and `recall_per_layer/<target layer>`. The best round's
    network is kept in memory (`best`), not on disk: nothing is ever pickled.
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
            scale_P: per pair, what logits are divided by before the loss (1 leaves them as they are).
            steps: optimiser steps of the schedule.
        """
        super().__init__()
        self.network = estimator.network(ahead)
        self._estimator = [estimator]  # in a list: only the network is trained, synchronised and moved
        self._source, self._ahead, self._loss = source, ahead, loss
        self._temperature, self._steps = temperature, steps
        self.register_buffer("scale_P", scale_P.clone())
        pairs = len(scale_P)
        # validation runs in full on every rank: summing over ranks would count each token twice
        self.recall = LayerRecall(pairs, sync_on_compute=False)
        self.best = BestState()
        self.history: list[dict[str, float]] = []

    def examples(self, batch: TraceBatch) -> tuple[Tensor, Tensor]:
        """Standardised inputs [P, T, F] and the routers' logits [P, T, E] of a batch."""
        estimator, ahead = self._estimator[0], self._ahead
        with torch.no_grad():
            states = states_of(self._source, forget_some(batch) if self.training else batch)
            x_PTF = torch.stack([estimator.features(state, ahead) for state in states[: len(self.scale_P)]])
            y_PTE = batch.logits_TLE[:, ahead:].transpose(0, 1).float().to(x_PTF.device)
            return estimator.standardised(x_PTF, ahead), y_PTE

    def training_step(self, batch: TraceBatch, batch_index: int) -> Tensor:
        del batch_index
        x_PTF, y_PTE = self.examples(batch)
        estimator, scale_P11 = self._estimator[0], self.scale_P[:, None, None]
        z_PTE = estimator.base(x_PTF, self._ahead) + scale_P11 * self.network(x_PTF).float()
        loss = distillation_loss(self._loss, y_PTE / scale_P11, z_PTE / scale_P11, self._temperature)
        self.log("loss", loss, batch_size=len(batch))
        return loss

    def validation_step(self, batch: TraceBatch, batch_index: int) -> None:
        del batch_index
        x_PTF, y_PTE = self.examples(batch)
        z_PTE = self._estimator[0].base(x_PTF, self._ahead) + self.scale_P[:, None, None] * self.network(x_PTF).float()
        for pair, layer in enumerate(self._source.view.layers[self._ahead :]):
            self.recall.update(pair, token_recall(layer.route(z_PTE[pair])[0], layer.route(y_PTE[pair])[0]))

    def on_validation_epoch_end(self) -> None:
        recall_P = self.recall.compute().reshape(-1)
        self.recall.reset()
        mean = float(recall_P.mean())
        self.log("recall", mean)
        for pair, value in enumerate(recall_P):
            self.log(f"recall_per_layer/{pair + self._ahead}", value)
        if self.trainer.sanity_checking:
            return
        self.history.append({"step": self.global_step, "recall": mean})
        if mean > self.best.recall:
            tensors = {key: tensor.detach().clone() for key, tensor in self.network.state_dict().items()}
            self.best = BestState(recall=mean, step=self.global_step, tensors=tensors)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        config = self._estimator[0].config
        optimizer = torch.optim.AdamW(
            self.network.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, betas=(0.9, 0.98)
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_cosine(step, self._steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def warm_cosine(step: int, steps: int) -> float:
    """Learning rate at a step as a share of the peak: linear warm-up, then a cosine down to 2%."""
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    progress = min(1.0, (step - warm) / max(1, steps - warm))
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress))
