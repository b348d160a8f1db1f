"""`expertcast pull`: download a checkpoint or traces from the Hugging Face hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from expertcast.checkpoints.checkpoint import CHECKPOINT, PredictorCheckpoint
from expertcast.checkpoints.hub import HubName, NotOnHubError, pull
from expertcast.commands.options import Option
from expertcast.commands.output import Outcome, folder
from expertcast.data.trace_format import TRACES
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `expertcast pull`."""

    repo: Annotated[str, Option(positional=True, metavar="USER/REPO[@REVISION]")]
    """Repository on the hub, with a branch, tag or commit."""
    out: Annotated[Path, Option(metavar="DIR", read=folder)]
    """Folder to create."""
    traces: bool = False
    """Download a data set of traces instead of a checkpoint."""


def run(options: Options) -> Outcome:
    """Download the files, verify their digests, and create the folder."""
    name = HubName.of(options.repo)
    if name is None:
        raise ExpertcastError(f"{options.repo!r} is no repository name: write user/repo, or user/repo@revision")
    if options.traces:
        pull(name, TRACES, options.out, lambda path: TraceDataset.open(path).verify())
    else:
        try:
            pull(name, CHECKPOINT, options.out, lambda path: PredictorCheckpoint.open(path).load())
        except NotOnHubError as error:
            raise ExpertcastError(f"{error}; for a data set of traces give --traces") from error
    what = "traces" if options.traces else "checkpoint"
    return {"repo": name.repo, "revision": name.revision, "folder": str(options.out)}, f"{what} {name} in {options.out}"
