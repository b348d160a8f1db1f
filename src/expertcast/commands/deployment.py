"""Options of commands that run a model offloaded as it was configured: a file of options, and others in their place."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from transformers import PreTrainedTokenizerBase

from expertcast.commands.options import BANDWIDTH, COUNT, Fields, Given, ModelOptions, Option
from expertcast.predictors import ExpertcastError
from expertcast.runtime.config import FORECASTS, MODES, OffloadConfig, named_checkpoint
from expertcast.runtime.offloading import OffloadedModel
from expertcast.runtime.policies import Policies
from expertcast.runtime.serving.warm import HotExperts, prepare, read_prompts

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
