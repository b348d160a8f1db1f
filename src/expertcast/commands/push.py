"""`expertcast push`: send a checkpoint or traces to the Hugging Face hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from expertcast.checkpoints.checkpoint import holds_predictor, push_checkpoint
from expertcast.checkpoints.hub import HubName
from expertcast.commands.options import Option
from expertcast.commands.output import Outcome
from expertcast.data.hub import push_traces
from expertcast.data.trace_format import TRACES
from expertcast.predictors import ExpertcastError


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `expertcast push`."""

    folder: Annotated[Path, Option(positional=True, metavar="CKPT|TRACES")]
    """Checkpoint, for a model repository, or traces folder, for a data set repository."""
    repo: Annotated[str, Option(positional=True, metavar="USER/REPO")]
    """Repository on the hub; created if missing."""
    private: bool = False
    """Create the repository as a private one."""
    revision: Annotated[str | None, Option(metavar="BRANCH")] = None
    """Branch to send to; created if missing (default: main)."""
    message: Annotated[str | None, Option(metavar="TEXT")] = None
    """Commit message."""
    license: Annotated[str | None, Option(metavar="ID")] = None
    """Licence in the card, such as apache-2.0 or cc-by-4.0."""


def run(options: Options) -> Outcome:
    """Compare the files with their digests, write a new card, and send all."""
    name = hub_name(options.repo, options.revision)
    if TRACES.holds(options.folder):
        send = push_traces
    elif holds_predictor(options.folder):
        send = push_checkpoint
    else:
        raise ExpertcastError(f"{options.folder} is neither a checkpoint folder nor a traces folder: give one of these")
    sent = send(options.folder, name, private=options.private, message=options.message, license=options.license)
    text = f"sent {sent['files']} files, {sent['bytes']:,} bytes, to {sent['type']} repository {name}\n{sent['url']}"
    if sent["license"] is None:
        text += "\nthe card has no licence: --license adds one"
    return sent, text


def hub_name(repo: str, revision: str | None) -> HubName:
    """Parse `user/repo` with a revision.

    Raises:
        ExpertcastError: not `user/repo`, or two revisions.
    """
    name = HubName.of(repo)
    if name is None:
        raise ExpertcastError(f"{repo!r} is no repository name: write user/repo")
    if revision is None:
        return name
    if name.revision is not None:
        raise ExpertcastError(f"{repo} and --revision {revision} are two revisions: give one of them")
    return HubName(name.repo, revision)
