"""Download and upload checkpoints and traces with huggingface_hub, its cache, login and environment variables.

Without a connection the cache is used. Complete files are not downloaded again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from expertcast.predictors.messages import ExpertcastError, Json


class NotOnHubError(ExpertcastError):
    """The repository does not exist, or is not visible to this user."""


class OutOfReachError(ExpertcastError):
    """The repository is not in the cache, and the hub is unreachable."""


_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^\s@]+))?")
_LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


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
def hub_errors(name: HubName, kind: Kind, doing: str) -> Iterator[None]:
    """Convert any exception of huggingface_hub into an error of one line with a remedy.

    Args:
        name: the repository.
        kind: kind of its contents.
        doing: `get` or `push to`, for messages.

    Raises:
        ExpertcastError: in place of any other exception.
    """
    try:
        yield
    except ExpertcastError:
        raise
    except Exception as error:  # errors of sockets, HTTP, files and values share no base class
        message = _message(name, kind, doing, error)
        if isinstance(error, RepositoryNotFoundError):
            raise NotOnHubError(message) from error
        raise (OutOfReachError if isinstance(error, LocalEntryNotFoundError) else ExpertcastError)(message) from error


def _message(name: HubName, kind: Kind, doing: str, error: Exception) -> str:
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    hub = constants.ENDPOINT
    if isinstance(error, GatedRepoError):
        return f"{name.repo} has restricted access: request access at {hub}/{name.repo}"
    if status == 401 and doing == "push to":
        return f"cannot push to {name.repo}: you are not logged in to the hub; {_LOGIN}"
    if status == 403:
        return f"cannot {doing} {name.repo}: permission denied; use another repository, or a token with write access"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{str(name)!r} is neither a local folder nor a visible {kind.repo_type} repository: use a {kind.what} "
            f"folder or user/repo (for a private repository, {_LOGIN})"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{name.repo} has no revision {name.revision!r}: use one of its branches, tags or commits"
    if isinstance(error, LocalEntryNotFoundError):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{hub} is unreachable"
        return f"{str(name)!r} is neither a local folder nor in the hub's cache, and {why}: use a folder, or go online"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[0].rstrip(".;") if lines else type(error).__name__
    return f"cannot {doing} {name.repo}: {reason}; try again, complete files are kept"


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
        raise _blame(name, folder, kind, error) from error


def download(name: HubName, kind: Kind) -> Path:
    """Download a repository into the hub's cache and return its folder.

    Raises:
        ExpertcastError: the repository or revision does not exist, is of another kind, or is neither reachable nor
            cached.
    """
    snapshot = _recognised(name, kind)
    commit = snapshot.name  # a push in the meantime does not change the files
    with hub_errors(name, kind, "get"):
        found = snapshot_download(name.repo, repo_type=kind.repo_type, revision=commit, allow_patterns=list(kind.files))
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


def _recognised(name: HubName, kind: Kind) -> Path:
    """Download the small files that identify the kind, and return the snapshot in the hub's cache.

    Raises:
        ExpertcastError: the download fails, or the repository is of another kind.
    """
    with hub_errors(name, kind, "get"):
        snapshot = snapshot_download(
            name.repo, repo_type=kind.repo_type, revision=name.revision, allow_patterns=list(kind.marks)
        )
    if not kind.holds(Path(snapshot)):
        raise ExpertcastError(f"{name} on the hub is not a {kind.what}: use another repository, or a folder")
    return Path(snapshot)


def _blame(name: HubName, snapshot: Path, kind: Kind, error: ExpertcastError) -> ExpertcastError:
    # the repository's cache folder is two levels above the snapshot
    remedy = f"remove {snapshot.parents[1]} to download it again, or tell its owner"
    return ExpertcastError(f"{name} on the hub: {str(error).replace(kind.remedy, remedy)}")


# Upload

CARD = "README.md"
MAIN = "main"
_HUBS_OWN = {CARD, ".gitattributes"}


def push(
    name: HubName,
    kind: Kind,
    content: Mapping[str, Path | bytes],
    *,
    private: bool = False,
    message: str | None = None,
    stale: Callable[[str], bool] = lambda _: False,
) -> Json:
    """Upload files to a repository in one commit; a missing repository or branch is created.

    Args:
        name: the repository; its revision is a branch.
        kind: kind of the contents.
        content: local file or bytes by path in the repository.
        private: whether to create the repository as private.
        message: commit message.
        stale: returns whether to delete a path of the repository that is not in `content`.

    Returns:
        `repo`, `type`, `revision`, `commit`, `url`, `files` and `bytes`.

    Raises:
        ExpertcastError: login or permission is missing, the hub is unreachable, the repository is of another kind, or
            it is public although `private` is set.
    """
    api, where = HfApi(library_name="expertcast"), {"repo_id": name.repo, "repo_type": kind.repo_type}
    branch = name.revision or MAIN
    with hub_errors(name, kind, "push to"):
        held = _held(api, name, kind)
        if held is None:
            api.create_repo(**where, private=private or None)
        elif private and not api.repo_info(**where).private:
            raise ExpertcastError(f"{name.repo} exists and is public: make it private on the hub, or omit private")
        if branch != MAIN:
            api.create_branch(**where, branch=branch, exist_ok=True)
        added = [CommitOperationAdd(path, source) for path, source in content.items()]
        gone = [CommitOperationDelete(path) for path in held or () if path not in content and stale(path)]
        title = message or f"Upload {kind.what}"
        commit = api.create_commit(**where, operations=[*added, *gone], commit_message=title, revision=branch)
    return {
        "repo": name.repo,
        "type": kind.repo_type,
        "revision": branch,
        "commit": commit.oid,
        "url": commit.commit_url,
        "files": len(added),
        "bytes": sum(each.upload_info.size for each in added),
    }


def _held(api: HfApi, name: HubName, kind: Kind) -> list[str] | None:
    """Return the paths in a repository at its branch (or default branch); None if there is no repository.

    Raises:
        ExpertcastError: the repository is of another kind.
    """
    where = {"repo_id": name.repo, "repo_type": kind.repo_type}
    try:
        info = api.repo_info(**where)
    except RepositoryNotFoundError:
        return None
    if name.revision is not None:
        with suppress(RevisionNotFoundError):
            info = api.repo_info(**where, revision=name.revision)
    held = [each.rfilename for each in info.siblings]
    if set(held) - _HUBS_OWN:
        marks = snapshot_download(**where, revision=info.sha, allow_patterns=list(kind.marks))
        if not kind.holds(Path(marks)):
            raise ExpertcastError(f"{name} on the hub is not a {kind.what}: use another name")
    return held
