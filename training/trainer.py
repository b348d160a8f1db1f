"""The Lightning trainer that networks are trained in: quiet, no pickled checkpoints, on one rank or under torchrun."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.strategies import DDPStrategy

import expertcast
from expertcast.data.distributed import training_share, wait_for_all
from expertcast.data.traces import TraceSource
from expertcast.predictors.progress import Progress
from expertcast.training.network_training import Examples, NetworkTraining, TrainingData
from expertcast.training.options import FitOptions
from expertcast.training.resume import SAVES, KeepState, PlainCheckpoints, logger_of, note_of, read_state, write_state

ROUNDS = 12
"""Validation rounds in a full run."""


class ShowSteps(Callback):  # type: ignore[misc]
    """Shows the steps of a schedule, and the score of the last validation round."""

    def __init__(self, name: str, options: FitOptions) -> None:
        """Of the training `name`, if the `options` say so."""
        self._name, self._shown = name, options.progress
        self._bar: Progress | None = None

    def on_train_start(self, trainer: lightning.Trainer, pl_module: NetworkTraining) -> None:
        done = trainer.global_step
        what = f"training {self._name}"
        self._bar = Progress(what, total=pl_module.steps, unit="step", initial=done, shown=self._shown)

    def on_train_batch_end(self, trainer: lightning.Trainer, *_of_the_batch: object) -> None:
        assert self._bar is not None
        self._bar.update(trainer.global_step - self._bar.n)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: NetworkTraining) -> None:
        if self._bar is not None and pl_module.best.history:
            score = pl_module.best.history[-1][pl_module.watched]
            self._bar.set_postfix_str(f"{pl_module.watched} {score:.4f}", refresh=False)

    def teardown(self, *_of_the_fit: object, stage: str | None = None) -> None:
        self._close()

    def on_exception(self, *_what_happened: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar is not None:  # a training may end before its first step
            self._bar.close()


class KeepSignals(Callback):  # type: ignore[misc]
    """Leaves SIGTERM to the program. Lightning's own handler ends it with status 0 and broadcasts between the ranks."""

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
        options: logs, progress, and where the state is kept against a kill; what is kept there of this very
            training is gone on from.
        name: the training's among those of one fit.
    """
    if options.resume_folder is None:
        _fit(module, data, options, name)
        return
    path = options.resume_folder / f"{name}.safetensors"
    mark = _fingerprint(module, source, options)
    note = note_of(path, mark)
    wait_for_all(training_share())  # all ranks have looked before the first one writes or removes
    if note is not None and note["finished"]:
        module.on_load_checkpoint(read_state(path))
        return
    keeping = [KeepState(path, max(1, module.steps // SAVES))]
    _fit(module, data, options, name, callbacks=keeping, states=PlainCheckpoints(mark), start=path if note else None)
    if training_share().rank == 0:
        state: dict[str, object] = {}
        module.on_save_checkpoint(state)
        write_state(path, state, {"fingerprint": mark, "step": module.steps, "finished": True})


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


def _fit(
    module: NetworkTraining,
    data: TrainingData[Examples],
    options: FitOptions,
    name: str,
    *,
    callbacks: list[Callback] | None = None,
    states: PlainCheckpoints | None = None,
    start: Path | None = None,
) -> None:
    logger = logger_of(options.log_folder, name, start)
    stopping = EarlyStopping(module.watched, mode=module.mode, patience=module.config.patience, min_delta=1e-4)
    with _quiet():
        trainer = lightning.Trainer(
            max_steps=module.steps,
            max_epochs=-1,
            val_check_interval=max(1, module.steps // ROUNDS),
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            gradient_clip_val=1.0,
            log_every_n_steps=10,
            logger=logger or False,
            callbacks=[stopping, ShowSteps(name, options), KeepSignals(), *(callbacks or [])],
            plugins=states,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,  # it counts epochs, and a schedule of steps has none
            **_placement(module),
        )
        try:
            trainer.fit(module, datamodule=data, ckpt_path=start, weights_only=True)
        except SystemExit as left:  # Lightning's way out of an interrupt
            if isinstance(left.__context__, KeyboardInterrupt):
                raise left.__context__ from None
            raise


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
