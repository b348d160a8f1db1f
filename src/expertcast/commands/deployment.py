"""Options of commands that run a model offloaded as it was configured: a file of options, and others in their place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from expertcast.commands.options import BANDWIDTH, COUNT, Fields, Given, ModelOptions, Option
from expertcast.commands.policies import POLICIES_HELP, policies_of
from expertcast.predictors import ExpertcastError
from expertcast.runtime.config import FORECASTS, MODES, OffloadConfig
from expertcast.runtime.option_values import named_checkpoint

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
