"""Download checkpoints and traces with huggingface_hub, its cache, login and environment variables.

Without a connection the cache is used. Complete files are not downloaded again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from expertcast.predictors.messages import ExpertcastError


class NotOnHubError(ExpertcastError):
    """The repository does not exist, or is not visible to this user."""


_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^\s@]+))?")


@dataclass(frozen=True, slots=True)
class HubName:
    """Name of a hub repository: `user/repo`, or `user/repo@revision` with a branch, tag or commit."""

    repo: str
    revision: str | None = None

    @classmethod
    def of(cls, given: str | Path) -> HubName | None:
        """Parse a name; None if the text is not a valid repository name."""
        match = _NAME.fullmatch(str(given))
        if match is None:
            return None
        try:
            validate_repo_id(match["repo"])
        except HFValidationError:
            return None
        return cls(match["repo"], match["revision"])

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Kind of folder, locally and on the hub: predictor checkpoint or traces."""

    what: str
    """Name in messages."""
    repo_type: str
    """`model` or `dataset`."""
    files: tuple[str, ...]
    """Glob patterns of its files; other files in a repository are ignored."""
    marks: tuple[str, ...]
    """Small files that identify the kind."""
    holds: Callable[[Path], bool]
    """Returns whether a folder is of this kind."""
    remedy: str
    """Remedy in error messages about local files; for a repository another remedy replaces it."""


@contextmanager
def hub_errors(name: HubName, kind: Kind) -> Iterator[None]:
    """Convert any exception of huggingface_hub into an error of one line with a remedy.

    Args:
        name: the repository.
        kind: kind of its contents.

    Raises:
        ExpertcastError: in place of any other exception.
    """
    try:
        yield
    except ExpertcastError:
        raise
    except Exception as error:  # errors of sockets, HTTP, files and values share no base class
        message = _message(name, kind, error)
        if isinstance(error, RepositoryNotFoundError):
            raise NotOnHubError(message) from error
        raise ExpertcastError(message) from error


def _message(name: HubName, kind: Kind, error: Exception) -> str:
    hub = constants.ENDPOINT
    if isinstance(error, GatedRepoError):
        return f"{name.repo} has restricted access: request access at {hub}/{name.repo}"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{str(name)!r} is neither a local folder nor a visible {kind.repo_type} repository: use a {kind.what} "
            f"folder or user/repo (for a private repository, log in with `hf auth login`, or set HF_TOKEN)"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{name.repo} has no revision {name.revision!r}: use one of its branches, tags or commits"
    if isinstance(error, LocalEntryNotFoundError):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{hub} is unreachable"
        return f"{str(name)!r} is neither a local folder nor in the hub's cache, and {why}: use a folder, or go online"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[0].rstrip(".;") if lines else type(error).__name__
    return f"cannot get {name.repo}: {reason}; try again, complete files are kept"


def located(given: str | Path, kind: Kind, revision: str | None = None) -> tuple[Path, HubName | None]:
    """Resolve a local folder or, failing that, download the hub repository of that name.

    Args:
        given: a path, `user/repo`, or `user/repo@revision`.
        kind: expected kind.
        revision: revision of the repository; takes precedence over one in `given`.

    Returns:
        The folder, and the repository if it was downloaded.

    Raises:
        ExpertcastError: `revision` is set for a local folder, or the download fails.
    """
    name = None if os.path.lexists(given) else HubName.of(given)
    if name is None:
        if revision is not None:
            raise ExpertcastError(f"revision={revision!r} needs a hub repository, {given} is a path: leave it out")
        return Path(given), None
    name = name if revision is None else HubName(name.repo, revision)
    return download(name, kind), name


@contextmanager
def repository_in_errors(name: HubName | None, folder: Path, kind: Kind) -> Iterator[None]:
    """Add the repository's name and a remedy to errors about a downloaded folder."""
    try:
        yield
    except ExpertcastError as error:
        if name is None:
            raise
        # the repository's cache folder is two levels above the snapshot
        remedy = f"remove {folder.parents[1]} to download it again, or tell its owner"
        raise ExpertcastError(f"{name} on the hub: {str(error).replace(kind.remedy, remedy)}") from error


def download(name: HubName, kind: Kind) -> Path:
    """Download a repository into the hub's cache and return its folder.

    Raises:
        ExpertcastError: the repository or revision does not exist, is of another kind, or is neither reachable nor
            cached.
    """
    snapshot = _snapshot(name, kind, name.revision, kind.marks)
    if not kind.holds(snapshot):
        raise ExpertcastError(f"{name} on the hub is not a {kind.what}: use another repository, or a folder")
    return _snapshot(name, kind, snapshot.name, kind.files)  # this commit, even if another is pushed in the meantime


def _snapshot(name: HubName, kind: Kind, revision: str | None, patterns: Sequence[str]) -> Path:
    with hub_errors(name, kind):
        found = snapshot_download(name.repo, repo_type=kind.repo_type, revision=revision, allow_patterns=list(patterns))
    return Path(found)


def real_folder(folder: Path) -> Path:
    """Return the folder behind links, which a rename would replace.

    Raises:
        ExpertcastError: it is a mount point, which cannot be renamed.
    """
    real = Path(os.path.realpath(folder))
    if os.path.ismount(real):
        raise ExpertcastError(f"{folder} is a mount point, which cannot be replaced as a whole: use a folder in it")
    return real
