"""What training any network here has in common: the optimiser, the learning rate, the best round, the order of tokens.

Steps are counted over all passes; a round is a run over the validation split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import ClassVar, Generic, TypeVar

import lightning
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from expertcast.data.distributed import training_share
from expertcast.data.traces import TraceSource
from expertcast.predictors import ExpertcastError
from expertcast.predictors.estimator import EstimatorConfig
from expertcast.predictors.next_token import NextTokenConfig
from expertcast.predictors.plain import Json
from expertcast.training.options import NO_VALIDATION, FitOptions, train_tokens

TrainedConfig = EstimatorConfig | NextTokenConfig
Examples = TypeVar("Examples")

WARM_UP = 0.05
FLOOR = 0.02
"""Learning rate at the end, as a share of the peak."""


@dataclass(kw_only=True)
class BestRound:
    """The network as it was at its best validation round, and all rounds' scores."""

    score: float
    """What the rounds are compared by; infinitely bad before the first one."""
    step: int = 0
    """The step of the best round."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """The network's weights then; empty before the first round."""
    history: list[dict[str, float]] = field(default_factory=list)
    """Step and score of every round."""


class NetworkTraining(lightning.LightningModule):  # type: ignore[misc]
    """Trains one network with AdamW and keeps it as it was at its best validation round."""

    watched: ClassVar[str] = "recall"
    """Name of the score of a validation round."""
    mode: ClassVar[str] = "max"
    """Whether a greater score (`max`) or a smaller one (`min`) is better."""

    def __init__(self, network: nn.Module, config: TrainedConfig, steps: int) -> None:
        """Train `network` as `config` says in a schedule of `steps` optimiser steps."""
        super().__init__()
        self.network, self.config, self.steps = network, config, steps
        self.best = BestRound(score=-math.inf if self.mode == "max" else math.inf)

    def identity(self) -> Json:
        """What must be the same for a training of this network to go on after a kill, as plain values."""
        return {"network": type(self).__name__, "config": self.config.as_dict(), "steps": self.steps}

    def end_round(self, score: float) -> None:
        """Log a validation round's score, and keep the network if none was better."""
        best, step = self.best, self.global_step
        self.log(self.watched, score)
        best.history.append({"step": step, self.watched: score})
        if score > best.score if self.mode == "max" else score < best.score:
            best.score, best.step = score, step
            best.tensors = {key: tensor.detach().clone() for key, tensor in self.network.state_dict().items()}

    def finish(self) -> Json:
        """Leave the network at its best round, no longer to be trained; what the report says of the training.

        Raises:
            ExpertcastError: there was nothing to validate on.
        """
        if not self.best.tensors:
            raise ExpertcastError(NO_VALIDATION)
        self.network.load_state_dict(self.best.tensors)
        self.network.requires_grad_(False)
        return {
            "parameters": sum(parameter.numel() for parameter in self.network.parameters()),
            "steps": self.best.step,
            "history": self.best.history,
        }

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW, its learning rate set anew at every step."""
        optimizer = torch.optim.AdamW(
            self.network.parameters(),
            lr=self.config.learning_rate,
            weight_decay=self.config.weight_decay,
            betas=(0.9, 0.98),
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_cosine(step, self.steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, object]) -> None:
        checkpoint["best"] = dict(vars(self.best))

    def on_load_checkpoint(self, checkpoint: Json) -> None:
        device = next(self.network.parameters()).device
        best = BestRound(**checkpoint["best"])
        best.tensors = {name: tensor.to(device) for name, tensor in best.tensors.items()}
        self.best = best


class TrainingData(lightning.LightningDataModule, Generic[Examples]):  # type: ignore[misc]
    """Passes over the train split, each in an order of its own, and the validation split; knows where training is."""

    def __init__(
        self,
        passing: Callable[[int, torch.Generator], Iterator[Examples]],
        validation: Callable[[], Iterator[Examples]],
        seed: int,
    ) -> None:
        """
        Args:
            passing: the batches of one pass over the train split, from the number of passes before it and a generator
                to draw from, in the state in which the pass before left it.
            validation: the batches of the validation split, in the same order each time.
            seed: of the generator.
        """
        super().__init__()
        self._passing, self._validation = passing, validation
        self._generator = torch.Generator().manual_seed(seed)
        self._begin = self._generator.get_state()
        self._epoch, self._skipped = -1, 0

    def train_dataloader(self) -> DataLoader[Examples]:
        """The next pass over the train split, each time it is iterated."""
        return DataLoader(_Stream(self._next_pass), batch_size=None)

    def val_dataloader(self) -> DataLoader[Examples]:
        """The validation split."""
        return DataLoader(_Stream(self._validation), batch_size=None)

    def _next_pass(self) -> Iterator[Examples]:
        self._epoch += 1
        self._begin = self._generator.get_state()
        skipped, self._skipped = self._skipped, 0
        return islice(self._passing(self._epoch, self._generator), skipped, None)

    def state_dict(self) -> dict[str, object]:
        """The position in the order of the train split, kept with the training's state."""
        batches = self.trainer.fit_loop.epoch_loop.batch_progress.current.completed
        return {"epoch": self._epoch, "generator": self._begin, "batches": batches}

    def load_state_dict(self, state_dict: Json) -> None:
        """Go on at a position; the batches of its pass before it are drawn again and left out."""
        self._epoch, self._begin = state_dict["epoch"] - 1, state_dict["generator"]
        self._skipped = state_dict["batches"]
        self._generator.set_state(self._begin)


class _Stream(IterableDataset[Examples]):
    """Whatever a function gives, anew each time."""

    def __init__(self, make: Callable[[], Iterator[Examples]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Examples]:
        return self._make()


def steps_of(config: TrainedConfig, source: TraceSource, options: FitOptions) -> int:
    """Optimiser steps of a training: those configured, in no more passes over the tokens than configured."""
    per_pass = max(1, train_tokens(source, options) // (config.step_tokens * training_share().world))
    return max(1, min(config.steps, config.passes * per_pass))


def warm_cosine(step: int, steps: int) -> float:
    """Learning rate at a step as a share of the peak: linear warm-up, then a cosine down to 2%."""
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    progress = min(1.0, (step - warm) / max(1, steps - warm))
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress))
