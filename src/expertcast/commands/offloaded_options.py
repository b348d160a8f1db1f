"""Options of commands that run a model over text: with any of these, one that is larger than memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from expertcast.commands.options import COUNT, ModelOptions, Option
from expertcast.data.distributed import join_ranks, wait_for_all
from expertcast.data.models import load_tokenizer
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.loading import load_offloaded
from expertcast.runtime.offloaded import OffloadedModel

_FEW_KERNELS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")
"""oneDNN keeps a kernel for each number of tokens that an expert got, 1,024 of them by default: 1.5 GB beside a model
that memory is too small for. It reads the variable when it makes the first one."""


@dataclass(frozen=True, kw_only=True)
class StoredOptions(ModelOptions):
    """How a model is loaded whose experts may lie in a folder."""

    store_folder: Annotated[str | None, Option(metavar="DIR")] = None
    """Run the model offloaded, its experts packed in this folder: for models larger than memory."""

    def opener(self, name: str) -> Callable[[OffloadConfig], OffloadedModel] | None:
        """What opens the model from the folder, offloaded as it is told; None: there is no folder.

        Args:
            name: the model's.
        """
        folder = self.store_folder
        if folder is None:
            return None

        given = self.passed_on(name)

        def opened(config: OffloadConfig) -> OffloadedModel:
            stored = OffloadConfig.of(config, {"store": "disk", "store_folder": folder, "codec": None})
            return load_offloaded(name, stored, device=self.device_name, dtype=self.dtype, **given)

        return opened


@dataclass(frozen=True, kw_only=True)
class OffloadedOptions(StoredOptions):
    """How a model is loaded that may run offloaded."""

    slots: Annotated[int | None, COUNT] = None
    """Run the model offloaded, with so many experts on the device (default with --store-folder: a quarter of all)."""
    memory: Annotated[str | None, Option(metavar="BYTES")] = None
    """The same in bytes, such as 2GB; activations take about as much beside it."""
    codec: Annotated[str | None, Option(metavar="CODEC")] = None
    """How experts are packed in --store-folder (default: as they are there, else raw)."""

    def load(self, name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """A model on its device, offloaded if any option says so, and its tokenizer.

        Raises:
            ExpertcastError: no such model, tokenizer or device, or options that rule each other out.
        """
        if not (self.store_folder or self.slots or self.memory or self.codec):
            return super().load(name)
        os.environ.setdefault(*_FEW_KERNELS)
        config = OffloadConfig(
            slots=self.slots, memory=self.memory, store="memory" if self.store_folder is None else "disk",
            store_folder=self.store_folder, codec=self.codec,
        )  # fmt: skip

        given = self.passed_on(name)

        def loaded() -> PreTrainedModel:
            return load_offloaded(name, config, device=self.device_name, dtype=self.dtype, **given).model

        share, tokenizer = join_ranks(), load_tokenizer(name, **given)
        model = loaded() if share.rank == 0 else None  # the first process packs, the others find what it packed
        wait_for_all(share)
        return loaded() if model is None else model, tokenizer
