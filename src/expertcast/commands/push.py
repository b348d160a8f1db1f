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
    """What `expertcast push` takes."""

    folder: Annotated[Path, Option(positional=True, metavar="CKPT|TRACES")]
    """Checkpoint, sent to a model repository, or traces folder, to a data set repository."""
    repo: Annotated[str, Option(positional=True, metavar="USER/REPO")]
    """The repository; it is made where it is missing."""
    private: bool = False
    """Let nobody else see it."""
    revision: Annotated[str | None, Option(metavar="BRANCH")] = None
    """Branch to send to, made where it is missing (default: main)."""
    message: Annotated[str | None, Option(metavar="TEXT")] = None
    """Of the commit."""
    license: Annotated[str | None, Option(metavar="ID")] = None
    """For the card, such as apache-2.0 or cc-by-4.0."""


def run(options: Options) -> Outcome:
    """Files are compared with their digests before anything is sent; the card is made anew."""
    name = hub_name(options.repo, options.revision)
    if TRACES.holds(options.folder):
        send = push_traces
    elif holds_predictor(options.folder):
        send = push_checkpoint
    else:
        raise ExpertcastError(f"{options.folder} is neither a checkpoint's folder nor one of traces: give one of these")
    sent = send(options.folder, name, private=options.private, message=options.message, license=options.license)
    text = f"sent {sent['files']} files, {sent['bytes']:,} bytes, to {sent['type']} repository {name}\n{sent['url']}"
    if sent["license"] is None:
        text += "\nits card names no licence: give one with --license"
    return sent, text


def hub_name(repo: str, revision: str | None) -> HubName:
    """
    Raises:
        ExpertcastError: not `user/repo`, or a revision twice.
    """
    name = HubName.of(repo)
    if name is None:
        raise ExpertcastError(f"{repo!r} is no name of a repository: write user/repo")
    if revision is None:
        return name
    if name.revision is not None:
        raise ExpertcastError(f"{repo} names a revision, and --revision {revision} another: give one of them")
    return HubName(name.repo, revision)
