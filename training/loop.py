"""Training a network with Lightning, on one rank or under torchrun, and resuming a training that was killed.

`expertcast train ... --out CKPT` keeps Lightning checkpoints in CKPT.partial, a file per training (a distance, a trial
of a temperature), and removes the folder when CKPT is written. Each validation round writes the file anew, whole or not
at all, so that a kill at any moment leaves one that can be used. A training resumes only from a checkpoint of its very
configuration, data and versions. On the CPU it ends bit for bit as one that was not interrupted.

Under torchrun the first rank writes and all ranks read: they must share the folder, as they share --out.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import os
import shutil
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import lightning
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import expertcast
from expertcast.data.processes import training_share, wait_for_all
from expertcast.data.trace_format import write_atomically
from expertcast.data.traces import TraceSource
from expertcast.predictors.artefacts import digest, open_file
from expertcast.predictors.estimator import EstimatorConfig
from expertcast.predictors.messages import ExpertcastError, Json, Progress
from expertcast.predictors.next_token import NextTokenConfig
from expertcast.training.scoring import NO_VALIDATION, FitOptions, train_tokens

log = logging.getLogger(__name__)


def resume_folder(out: Path) -> Path:
    """Where the trainings of the checkpoint `out` keep their states: beside it."""
    return out.with_name(out.name + ".partial")


def forget(out: Path) -> None:
    """Remove what the trainings of the checkpoint `out` have kept: it is complete."""
    shutil.rmtree(resume_folder(out), ignore_errors=True)


def usable_state(path: Path, fingerprint: str) -> Json | None:
    """The Lightning checkpoint in a file, or None where training must start over; the reason is logged.

    Args:
        path: of the file.
        fingerprint: of the training to resume; the checkpoint of another one is not used.
    """
    if not os.path.lexists(path):
        return None
    try:
        state = read_state(path)
    except ExpertcastError as error:
        log.warning("%s: this training starts over", error)
        return None
    if state["fingerprint"] != fingerprint:
        log.warning("%s is of another configuration, other data or other versions: this training starts over", path)
        return None
    log.warning("%s: going on at step %s", path, state["global_step"])
    return state


def write_state(path: Path, state: Mapping[str, object]) -> None:
    """Write a checkpoint of plain values and tensors behind its digest, whole or not at all; its folder is made."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, digest(buffer.getvalue()).encode() + buffer.getvalue())


def read_state(path: Path) -> Json:
    """What :func:`write_state` wrote, its tensors on the CPU; nothing but plain values and tensors is unpickled.

    Raises:
        ExpertcastError: it is not there, or is damaged.
    """
    try:
        with open_file(path) as file:
            found, data = file.read(len(digest(b""))), file.read()
    except OSError as error:
        raise ExpertcastError(f"{path} is damaged ({error.strerror}); remove it") from error
    if found != digest(data).encode():
        raise ExpertcastError(f"{path} is damaged: it was changed after it was written; remove it")
    state: Json = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return state


class SealedCheckpoints(CheckpointIO):  # type: ignore[misc]
    """Writes and reads Lightning's checkpoints with their digest and the fingerprint of their training."""

    def __init__(self, fingerprint: str) -> None:
        self._fingerprint = fingerprint

    def save_checkpoint(
        self, checkpoint: Mapping[str, object], path: Path | str, storage_options: object = None
    ) -> None:
        """Write a checkpoint; `storage_options` are of other kinds of storage."""
        write_state(Path(path), {**checkpoint, "fingerprint": self._fingerprint})

    def load_checkpoint(
        self, path: Path | str, map_location: object = None, weights_only: bool | None = None
    ) -> dict[str, object]:
        """The checkpoint on the CPU; Lightning moves tensors to where they belong."""
        return read_state(Path(path))

    def remove_checkpoint(self, path: Path | str) -> None:
        """Remove one checkpoint."""
        Path(path).unlink(missing_ok=True)


def logger_of(folder: Path | None, name: str, state: Json | None) -> TensorBoardLogger | None:
    """TensorBoard's logger of a training; None without a folder.

    Args:
        folder: of all logs.
        name: the training's.
        state: the checkpoint that it goes on from. If it logged in this folder it keeps its version there, and
            TensorBoard leaves out what was logged after the checkpoint. Without one the version is new.
    """
    if folder is None:
        return None
    logs = Path("" if state is None else state["logs"])
    if state is None or logs.parent != Path(os.path.abspath(folder / name)):
        return TensorBoardLogger(str(folder), name=name)
    return TensorBoardLogger(str(folder), name=name, version=logs.name, purge_step=state["global_step"])


# What trainings have in common. Steps are counted over all passes; a round is a run over the validation split.

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
        checkpoint["logs"] = os.path.abspath(self.logger.log_dir) if self.logger else ""

    def on_load_checkpoint(self, checkpoint: Json) -> None:
        self.best = BestRound(**checkpoint["best"])


class TrainingData(lightning.LightningDataModule, Generic[Examples]):  # type: ignore[misc]
    """Passes over the train split, each in an order of its own, and the validation split; its state is the position."""

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


ROUNDS = 12
"""Validation rounds in a full run."""


class ShowSteps(Callback):  # type: ignore[misc]
    """Moves a bar by the steps of a schedule, and shows the score of the last validation round beside it."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar

    def on_train_batch_end(self, trainer: lightning.Trainer, *_of_the_batch: object) -> None:
        self._bar.update(trainer.global_step - self._bar.n)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: NetworkTraining) -> None:
        score = pl_module.best.history[-1][pl_module.watched]
        self._bar.set_postfix_str(f"{pl_module.watched} {score:.4f}", refresh=False)


class KeepSignals(Callback):  # type: ignore[misc]
    """Leaves SIGTERM to the program: Lightning's own handler broadcasts between the ranks, which hangs in a step."""

    def __init__(self) -> None:
        self._handler = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, trainer: lightning.Trainer, pl_module: NetworkTraining) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._handler)


def run(
    module: NetworkTraining, data: TrainingData[Examples], source: TraceSource, options: FitOptions, name: str
) -> None:
    """Train `module` to the end of its schedule; its best validation round is in `module.best` afterwards.

    Args:
        module: the training.
        data: what it learns from and is validated on.
        source: where that comes from.
        options: logs, progress, and where the checkpoint is kept against a kill; one of this very training is gone on
            from.
        name: the training's among those of one fit.
    """
    folder, state, path, keeping, states = options.resume_folder, None, None, [], None
    if folder is not None:
        path, mark = folder / f"{name}{ModelCheckpoint.FILE_EXTENSION}", _fingerprint(module, source, options)
        state = usable_state(path, mark)
        wait_for_all(training_share())  # all ranks have looked before the first one writes
        # after a validation round: what Lightning saves before one, it does not go on from to the bit
        keeping = [ModelCheckpoint(folder, name, save_on_train_epoch_end=False, enable_version_counter=False)]
        states = SealedCheckpoints(mark)
    stopping = EarlyStopping(module.watched, mode=module.mode, patience=module.config.patience, min_delta=1e-4)
    if state is not None and state["callbacks"][stopping.state_key]["wait_count"] >= stopping.patience:
        module.on_load_checkpoint(state)  # it was stopped, and killed before the next training began
        return
    begin = 0 if state is None else state["global_step"]
    with (
        _quiet(),
        Progress(f"training {name}", total=module.steps, unit="step", initial=begin, shown=options.progress) as bar,
    ):
        logger = logger_of(options.log_folder, name, state)
        trainer = _trainer(module, [stopping, ShowSteps(bar), KeepSignals(), *keeping], logger, states)
        try:
            trainer.fit(module, datamodule=data, ckpt_path=None if state is None else path, weights_only=True)
        except SystemExit as left:  # Lightning's way out of an interrupt
            if isinstance(left.__context__, KeyboardInterrupt):
                raise left.__context__ from None
            raise


def _trainer(
    module: NetworkTraining,
    callbacks: list[Callback],
    logger: TensorBoardLogger | None,
    states: SealedCheckpoints | None,
) -> lightning.Trainer:
    return lightning.Trainer(
        max_steps=module.steps,
        max_epochs=-1,
        val_check_interval=max(1, module.steps // ROUNDS),
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        logger=logger or False,
        callbacks=callbacks,
        plugins=states,
        enable_checkpointing=states is not None,
        enable_model_summary=False,
        enable_progress_bar=False,  # it counts epochs, and a schedule of steps has none
        **_placement(module),
    )


def _fingerprint(module: NetworkTraining, source: TraceSource, options: FitOptions) -> str:
    """One value for all that must be the same for a training to go on: what it is, its data, the versions at work."""
    about = {
        "training": module.identity(),
        "data": {key: value for key, value in source.info.items() if key not in ("command", "documents")},
        "options": [options.tokens, options.validation_tokens, options.seed],
        "ranks": training_share().world,
        "versions": [expertcast.__version__, torch.__version__, lightning.__version__],
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _placement(module: lightning.LightningModule) -> dict[str, object]:
    """Device and strategy: where the network is, and DDP over gloo or nccl in a process group of several ranks."""
    device = next(module.parameters()).device
    on_gpu = device.type == "cuda"
    world = training_share().world
    accelerator = "gpu" if on_gpu else "cpu"
    if world == 1:
        return {"accelerator": accelerator, "devices": [device.index or 0] if on_gpu else 1}
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    strategy = DDPStrategy(process_group_backend="nccl" if on_gpu else "gloo")
    return {"accelerator": accelerator, "devices": per_node, "num_nodes": world // per_node, "strategy": strategy}


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Lightning's remarks on hardware and data loaders off the terminal."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
