"""Train a network with Lightning on one rank or under torchrun, and resume a training that was killed.

`expertcast train ... --out CKPT` keeps a Lightning checkpoint per distance in CKPT.partial, and removes that folder
when CKPT is complete. Each validation round replaces the file atomically. A training resumes only with the same
configuration, data and versions. On a CPU the result is bit-identical to that of an uninterrupted training.

Under torchrun rank 0 writes and all ranks read, so they must share the folder.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

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
from expertcast.data.batch import TraceBatch
from expertcast.data.processes import training_share, wait_for_all
from expertcast.data.traces import TraceSource
from expertcast.predictors.artefacts import digest, open_file, write_atomically
from expertcast.predictors.linear import LinearConfig
from expertcast.predictors.messages import ExpertcastError, Json, Progress
from expertcast.training.scoring import NO_VALIDATION, FitOptions, train_tokens, validation_batches

log = logging.getLogger(__name__)


def resume_folder(out: Path) -> Path:
    """Return the folder for training states of the checkpoint `out`: a sibling of it."""
    return out.with_name(out.name + ".partial")


def usable_state(path: Path, fingerprint: str) -> Json | None:
    """Read a training state; None, with a log message, if the training must start over.

    Args:
        path: the file.
        fingerprint: fingerprint of the training; a state of another training is not used.
    """
    if not os.path.lexists(path):
        return None
    try:
        state = read_state(path)
    except ExpertcastError as error:
        log.warning("%s: this training starts over", error)
        return None
    if state["fingerprint"] != fingerprint:
        log.warning("%s has another configuration, other data or other versions: this training starts over", path)
        return None
    log.warning("%s: resuming at step %s", path, state["global_step"])
    return state


def write_state(path: Path, state: Mapping[str, object]) -> None:
    """Write plain values and tensors with a digest, atomically; missing folders are created."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, digest(buffer.getvalue()).encode() + buffer.getvalue())


def read_state(path: Path) -> Json:
    """Read a file of :func:`write_state`, with tensors on the CPU; unpickles plain values and tensors only.

    Raises:
        ExpertcastError: the file is missing or damaged.
    """
    try:
        with open_file(path) as file:
            found, data = file.read(len(digest(b""))), file.read()
    except OSError as error:
        raise ExpertcastError(f"cannot read {path} ({error.strerror}): remove it") from error
    if found != digest(data).encode():
        raise ExpertcastError(f"{path} is damaged, its digest differs: remove it")
    state: Json = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return state


class SealedCheckpoints(CheckpointIO):  # type: ignore[misc]
    """Stores Lightning checkpoints with a digest and the fingerprint of their training."""

    def __init__(self, fingerprint: str) -> None:
        self._fingerprint = fingerprint

    def save_checkpoint(
        self, checkpoint: Mapping[str, object], path: Path | str, storage_options: object = None
    ) -> None:
        """Write a checkpoint; `storage_options` are ignored."""
        write_state(Path(path), {**checkpoint, "fingerprint": self._fingerprint})

    def load_checkpoint(
        self, path: Path | str, map_location: object = None, weights_only: bool | None = None
    ) -> dict[str, object]:
        """Read a checkpoint to the CPU; Lightning moves its tensors."""
        return read_state(Path(path))

    def remove_checkpoint(self, path: Path | str) -> None:
        """Delete a checkpoint."""
        Path(path).unlink(missing_ok=True)


# Base of all trainings. Steps are counted over all passes; a round is one pass over the validation split.

WARM_UP = 0.05
FLOOR = 0.02
"""Final learning rate as a share of the peak."""


@dataclass(kw_only=True)
class BestRound:
    """The network's weights at its best validation round, and the recall of all rounds."""

    score: float = -math.inf
    """Recall of the best round."""
    step: int = 0
    """Step of the best round."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """The network's weights at that round; empty before the first round."""
    recall_GP: list[list[float]] = field(default_factory=list)
    """Recall of each gate and layer pair at that round."""
    history: list[dict[str, float]] = field(default_factory=list)
    """Step and recall of each round."""


class NetworkTraining(lightning.LightningModule):  # type: ignore[misc]
    """Trains one network with AdamW and keeps its weights of the best validation round.

    Args:
        network: network to train.
        config: training options.
        steps: optimiser steps of the schedule.
    """

    def __init__(self, network: nn.Module, config: LinearConfig, steps: int) -> None:
        super().__init__()
        self.network, self.config, self.steps = network, config, steps
        self.best = BestRound()
        self.begun, self.earlier_s = time.perf_counter(), 0.0
        """Start of this training, and seconds of the killed ones that it resumes."""

    def identity(self) -> Json:
        """Return JSON values that identify the training; a training state is only used if they are equal."""
        return {"network": type(self).__name__, "config": self.config.as_dict(), "steps": self.steps}

    def end_round(self, recall_GP: Tensor) -> None:
        """Log a validation round's recall, that of its best gate; keep the network's weights if it is the best."""
        best, step, recall = self.best, self.global_step, float(recall_GP.mean(dim=1).max())
        self.log("recall", recall)
        best.history.append({"step": step, "recall": recall})
        if recall > best.score:
            best.score, best.step, best.recall_GP = recall, step, recall_GP.tolist()
            best.tensors = {key: tensor.detach().clone() for key, tensor in self.network.state_dict().items()}

    def finish(self) -> Json:
        """Restore the best round's weights, disable gradients, and return the report.

        Raises:
            ExpertcastError: the validation split is empty.
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
        """Create AdamW with a learning rate that changes at every step."""
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
        checkpoint["seconds"] = time.perf_counter() - self.begun + self.earlier_s

    def on_load_checkpoint(self, checkpoint: Json) -> None:
        self.best = BestRound(**checkpoint["best"])


class TrainingData(lightning.LightningDataModule):  # type: ignore[misc]
    """Passes over the train split, each in its own random order, and the validation split, in full on each rank.

    Resumable at any batch of `step_tokens` tokens.
    """

    def __init__(self, source: TraceSource, options: FitOptions, step_tokens: int) -> None:
        super().__init__()
        self._source, self._options, self._size = source, options, step_tokens
        self._epoch, self._skipped = -1, 0

    def train_dataloader(self) -> DataLoader[TraceBatch]:
        """Return a loader that starts a new pass over the train split at each iteration."""
        return DataLoader(_Stream(self._next_pass), batch_size=None)

    def val_dataloader(self) -> DataLoader[TraceBatch]:
        """Return a loader of the validation split, always in the same order."""
        validation = partial(validation_batches, self._source, self._options, self._size)
        return DataLoader(_Stream(validation), batch_size=None)

    def _next_pass(self) -> Iterator[TraceBatch]:
        self._epoch += 1
        skipped, self._skipped = self._skipped, 0
        options = self._options
        batches = self._source.batches(
            "train", self._size, shuffle=True, seed=options.seed + self._epoch, max_tokens=options.tokens,
            share=training_share(),
        )  # fmt: skip
        return islice(batches, skipped, None)

    def state_dict(self) -> dict[str, object]:
        """Return the position in the train split."""
        batches = self.trainer.fit_loop.epoch_loop.batch_progress.current.completed
        return {"epoch": self._epoch, "batches": batches}

    def load_state_dict(self, state_dict: Json) -> None:
        """Continue at a position; earlier batches of the same pass are drawn again and skipped."""
        self._epoch, self._skipped = state_dict["epoch"] - 1, state_dict["batches"]


class _Stream(IterableDataset[TraceBatch]):
    """Iterates over the result of a function, called anew for each iteration."""

    def __init__(self, make: Callable[[], Iterator[TraceBatch]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[TraceBatch]:
        return self._make()


def steps_of(config: LinearConfig, source: TraceSource, options: FitOptions) -> int:
    """Return the optimiser steps of a training: `config.steps`, limited to `config.passes` passes over the tokens."""
    per_pass = max(1, train_tokens(source, options) // (config.step_tokens * training_share().world))
    return min(config.steps, config.passes * per_pass)


def warm_cosine(step: int, steps: int) -> float:
    """Return the learning rate at a step as a share of the peak: linear warm-up, then cosine decay to 2%."""
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    progress = min(1.0, (step - warm) / max(1, steps - warm))
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress))


ROUNDS = 12
"""Number of validation rounds in a full run."""


class ShowSteps(Callback):  # type: ignore[misc]
    """Updates a progress bar with the step, and shows the score of the last validation round."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar

    def on_train_batch_end(self, trainer: lightning.Trainer, *_of_the_batch: object) -> None:
        self._bar.update(trainer.global_step - self._bar.n)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: NetworkTraining) -> None:
        score = pl_module.best.history[-1]["recall"]
        self._bar.set_postfix_str(f"recall {score:.4f}", refresh=False)


class KeepSignals(Callback):  # type: ignore[misc]
    """Restores the program's SIGTERM handler: Lightning's broadcasts between ranks, which can deadlock."""

    def __init__(self) -> None:
        self._handler = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, trainer: lightning.Trainer, pl_module: NetworkTraining) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._handler)


def run(module: NetworkTraining, data: TrainingData, source: TraceSource, options: FitOptions, name: str) -> None:
    """Train `module` to the end of its schedule; `module.best` then has the best validation round.

    Args:
        module: the training.
        data: training and validation batches.
        source: source of the data, for the fingerprint.
        options: logging, progress, and the folder for training states. A state of the same training is resumed.
        name: name of the training within the fit.
    """
    folder, state, path, keeping, states = options.resume_folder, None, None, [], None
    if folder is not None:
        path, mark = folder / f"{name}{ModelCheckpoint.FILE_EXTENSION}", fingerprint(module.identity(), source, options)
        state = usable_state(path, mark)
        if state is not None:
            module.earlier_s = state["seconds"]
            options.earlier_s += state["seconds"]
        wait_for_all(training_share())  # all ranks must have read the state before rank 0 writes
        # save after validation rounds: resuming from a state before one is not bit-identical
        keeping = [ModelCheckpoint(folder, name, save_on_train_epoch_end=False, enable_version_counter=False)]
        states = SealedCheckpoints(mark)
    stopping = EarlyStopping("recall", mode="max", patience=module.config.patience, min_delta=1e-4)
    if state is not None and state["callbacks"][stopping.state_key]["wait_count"] >= stopping.patience:
        module.on_load_checkpoint(state)  # this training was complete when the process was killed
        return
    begin, device = 0 if state is None else state["global_step"], next(module.parameters()).device
    with (
        _quiet(),
        Progress(f"training {name}", total=module.steps, unit="step", initial=begin, shown=options.progress) as bar,
    ):
        logger = TensorBoardLogger(str(options.log_folder), name=name) if options.log_folder else None
        trainer = lightning.Trainer(
            max_steps=module.steps,
            max_epochs=-1,
            val_check_interval=max(1, module.steps // ROUNDS),
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            gradient_clip_val=1.0,
            log_every_n_steps=10,
            logger=logger or False,
            callbacks=[stopping, ShowSteps(bar), KeepSignals(), *keeping],
            plugins=states,
            enable_checkpointing=states is not None,
            enable_model_summary=False,
            enable_progress_bar=False,  # Lightning's bar counts epochs, the schedule counts steps
            **_placement(module),
        )
        try:
            trainer.fit(module, datamodule=data, ckpt_path=None if state is None else path, weights_only=True)
        except SystemExit as left:  # Lightning converts an interrupt into this
            if isinstance(left.__context__, KeyboardInterrupt):
                raise left.__context__ from None
            raise
    module.to(device)  # Lightning leaves it on the CPU


def fingerprint(identity: Json, source: TraceSource, options: FitOptions) -> str:
    """Hash all that must be equal for a training to resume: its identity, data, ranks and versions."""
    about = {
        "training": identity,
        "data": {key: value for key, value in source.info.items() if key not in ("command", "documents")},
        "options": [options.tokens, options.validation_tokens, options.seed],
        "ranks": training_share().world,
        "versions": [expertcast.__version__, torch.__version__, lightning.__version__],
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _placement(module: lightning.LightningModule) -> dict[str, object]:
    """Return device and strategy: the network's device; for several ranks DDP over the process group of
    :func:`join_ranks`, where each rank's network is on its own GPU or on the CPU.

    Raises:
        ExpertcastError: fewer GPUs than ranks on this machine.
    """
    device = next(module.parameters()).device
    on_gpu = device.type == "cuda"
    world = training_share().world
    accelerator = "gpu" if on_gpu else "cpu"
    if world == 1:
        return {"accelerator": accelerator, "devices": [device.index or 0] if on_gpu else 1}
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if on_gpu and per_node > torch.cuda.device_count():
        raise ExpertcastError(
            f"{per_node} ranks on {torch.cuda.device_count()} GPUs: start one for each GPU, or give --device cpu"
        )
    return {
        "accelerator": accelerator, "devices": per_node, "num_nodes": world // per_node, "strategy": DDPStrategy(),
    }  # fmt: skip


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide Lightning's messages about hardware and data loaders."""
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
