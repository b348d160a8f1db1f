"""Options of commands that run a model offloaded as it was configured: a file of options, and others in their place."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from expertcast.commands.options import BANDWIDTH, COUNT, Fields, Given, ModelOptions, Option
from expertcast.data.models import load_tokenizer
from expertcast.data.processes import join_ranks, wait_for_all
from expertcast.predictors import ExpertcastError
from expertcast.runtime.config import FORECASTS, MODES, OffloadConfig, named_checkpoint
from expertcast.runtime.loading import load_offloaded
from expertcast.runtime.offloading import OffloadedModel
from expertcast.runtime.policies import Policies
from expertcast.runtime.serving.warm import HotExperts, prepare, read_prompts

# Policies as the command line takes them: a preset's name, or one for each kind that is not the default.

POLICIES_HELP = "eviction, prefetch, miss, routing, pre_eviction or scope, such as eviction=lfu; or a preset's name"


def policies_of(words: Sequence[str]) -> Policies | str:
    """`kind=policy` for each kind that is not the default, or a preset's name.

    Raises:
        ExpertcastError: an unknown kind or policy.
    """
    if len(words) == 1 and "=" not in words[0]:
        return words[0]
    kinds = list(Policies().as_dict())
    given = dict(word.partition("=")[::2] for word in words)
    for kind in given:
        if kind not in kinds:
            raise ExpertcastError(f"--policies {kind}: give a preset alone, or KIND=POLICY of {', '.join(kinds)}")
    return Policies(**given)


# Options of commands that run a model over text: with any of these, one that is larger than memory.

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


OFFLOAD = Fields(
    predictor=Option(metavar="NAME|CKPT"),
    mode=Option(choices=MODES),
    slots=COUNT,
    memory=Option(metavar="BYTES"),
    next_token=Option(metavar="CKPT"),
    forecasts=Option(choices=FORECASTS),
    draft=Option(metavar="DRAFT"),
    bandwidth=BANDWIDTH,
)
"""The options of :class:`OffloadConfig` that are given by themselves; all of them may stand in the file."""


@dataclass(frozen=True, kw_only=True)
class DeploymentOptions(ModelOptions):
    """How a model is offloaded by a command."""

    config: Annotated[Path | None, Option(metavar="FILE")] = None
    """How to offload, as `expertcast advise --save` or OffloadConfig.save wrote it; other options win over it."""
    policies: Annotated[tuple[str, ...], Option(metavar="KIND=P", help=POLICIES_HELP)] = ()
    """How experts are evicted, prefetched and missed."""
    store_folder: Annotated[str | None, Option(metavar="DIR")] = None
    """Keep the experts packed in this folder, for models larger than memory."""
    codec: Annotated[str | None, Option(metavar="CODEC")] = None
    """How experts are packed in --store-folder (default: as they are there, else raw)."""
    pools: Annotated[str | None, Option(metavar="C=BYTES,...")] = None
    """With a codec, memory for experts that are kept compressed beside the slots; see `expertcast advise`."""
    offload: Annotated[Given[OffloadConfig], OFFLOAD]
    """How the experts are offloaded; defaults are those without --config."""

    def configuration(self) -> OffloadConfig:
        """The file's configuration, or the default one, with what was given in place of what it says.

        Raises:
            ExpertcastError: a bad file, or options that the file's others rule out; the line names the file.
        """
        config = OffloadConfig() if self.config is None else OffloadConfig.load(self.config)
        try:
            made = OffloadConfig.of(config, self._changed())
            for given in (made.predictor, made.next_token):
                if isinstance(given, (str, Path)):
                    named_checkpoint(given)
        except ExpertcastError as error:
            if self.config is None:
                raise
            raise ExpertcastError(f"{self.config} with what is given beside it: {error}") from error
        return made

    def _changed(self) -> Mapping[str, object]:
        changed = dict(self.offload)
        if self.policies:
            changed["policies"] = policies_of(self.policies)
        if self.store_folder is not None:
            changed |= {"store": "disk", "store_folder": self.store_folder}
        if self.codec is not None:
            changed["codec"] = self.codec
        if self.pools is not None:
            changed["pools"] = self.pools
        if ("slots" in changed) != ("memory" in changed):  # two ways to say the same: the file's goes
            changed = {"slots": None, "memory": None, **changed}
        return changed


# Options of a command that serves: slots that are full before the first request.


@dataclass(frozen=True, kw_only=True)
class WarmOptions:
    """Which files fill slots before the first request."""

    warm: Annotated[Path | None, Option(metavar="FILE")] = None
    """Prompts to run first, one per line, or a .jsonl file of {"prompt": ...}."""
    hot_experts: Annotated[Path | None, Option(metavar="FILE")] = None
    """Begin with the experts that the last run used most; written at the end."""

    def prompts(self) -> list[str]:
        """Those of the file; to be read before a model is loaded.

        Raises:
            ExpertcastError: there is no such file, or not what it should be.
        """
        return [] if self.warm is None else read_prompts(self.warm)

    @contextmanager
    def warmed(
        self, offloaded: OffloadedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str]
    ) -> Iterator[list[str]]:
        """Slots are filled, and the hot experts written at the end, however it comes; no forward runs then.

        Yields:
            One line of each thing that was done, or left out.
        """
        hot = None if self.hot_experts is None else HotExperts(self.hot_experts, offloaded)
        said = prepare(offloaded, tokenizer, prompts, hot)
        failed = True
        try:
            yield said
            failed = False
        finally:
            try:
                if hot is not None:
                    hot.save()
            except ExpertcastError as error:
                if not failed:
                    raise
                print(f"hot experts are not written: {error}", file=sys.stderr)  # what failed first is the error
