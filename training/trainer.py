"""The Lightning trainer that distillation runs in: quiet, no pickled checkpoints, on one rank or under torchrun."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from expertcast.data.datamodule import TraceDataModule
from expertcast.data.distributed import training_share
from expertcast.data.traces import TraceSource
from expertcast.training.options import FitOptions

ROUNDS = 12
"""Validation rounds in a full run."""


def run(
    module: lightning.LightningModule,
    data: lightning.LightningDataModule,
    options: FitOptions,
    *,
    steps: int,
    patience: int,
    log_name: str,
    watch: tuple[str, str] = ("recall", "max"),
) -> None:
    """Train `module` for at most `steps` steps; its best validation round is in `module.best` afterwards.

    Args:
        watch: what the module logs in a validation round, and whether more of it (`max`) or less (`min`) is better.
    """
    callbacks: list[Callback] = [EarlyStopping(watch[0], mode=watch[1], patience=patience, min_delta=1e-4)]
    logger: Any = False
    if options.log_folder is not None:
        logger = TensorBoardLogger(str(options.log_folder), name=log_name)
    with _quiet():
        trainer = lightning.Trainer(
            max_steps=steps,
            max_epochs=-1,
            val_check_interval=max(1, steps // ROUNDS),
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            gradient_clip_val=1.0,
            log_every_n_steps=10,
            logger=logger,
            callbacks=callbacks,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=options.progress,
            **_placement(module),
        )
        trainer.fit(module, datamodule=data)


class StepBatches(TraceDataModule):
    """The source's data module, its validation cut to what the options allow."""

    def __init__(self, source: TraceSource, options: FitOptions, step_tokens: int) -> None:
        super().__init__(source, tokens_per_batch=step_tokens, max_tokens=options.tokens, seed=options.seed)
        self._options = options

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader("validation", max_tokens=self._options.validation_tokens)


def _placement(module: lightning.LightningModule) -> dict[str, Any]:
    """Device and strategy: where the network is, and DDP over gloo or nccl in a process group of several ranks."""
    device = next(module.parameters()).device
    on_gpu = device.type == "cuda"
    world = training_share().world
    placement: dict[str, Any] = {"accelerator": "gpu" if on_gpu else "cpu"}
    if world == 1:
        return placement | {"devices": [device.index or 0] if on_gpu else 1}
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    strategy = DDPStrategy(process_group_backend="nccl" if on_gpu else "gloo")
    return placement | {"devices": per_node, "num_nodes": world // per_node, "strategy": strategy}


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
