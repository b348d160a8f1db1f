"""Download and upload of checkpoints and traces, by huggingface_hub with its cache, login and environment variables.

Where the hub is out of reach, the cache serves. Whole files are not downloaded again.
"""

from __future__ import annotations

import os
import re
import shutil
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
    """No such repository, or none that the hub shows this user."""


class OutOfReachError(ExpertcastError):
    """No such repository in the cache, and no way to the hub."""


_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^\s@]+))?")
_LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


@dataclass(frozen=True, slots=True)
class HubName:
    """`user/repo`, or `user/repo@revision` with a branch, a tag or a commit."""

    repo: str
    revision: str | None = None

    @classmethod
    def of(cls, given: str | Path) -> HubName | None:
        """What a text names; None where it can be no such name."""
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
    """What a folder of ours is, here and on the hub."""

    what: str
    """For messages."""
    repo_type: str
    """model or dataset."""
    files: tuple[str, ...]
    """Patterns of its files; whatever else a repository holds is left there."""
    marks: tuple[str, ...]
    """Small files among them by which `holds` tells it."""
    holds: Callable[[Path], bool]
    """Whether a folder is one."""
    remedy: str
    """What its readers say to do about a file that is not right; there are other remedies for one from the hub."""


@contextmanager
def in_one_line(name: HubName, kind: Kind, doing: str) -> Iterator[None]:
    """Whatever huggingface_hub and what is below it raise, in one line with what helps.

    Args:
        name: of the repository.
        kind: what it holds, or is to hold.
        doing: `get` or `push to`, for messages.

    Raises:
        ExpertcastError: for any other error.
    """
    try:
        yield
    except ExpertcastError:
        raise
    except Exception as error:  # of sockets, HTTP, files and values, which share no class
        said = _said(name, kind, doing, error)
        if isinstance(error, RepositoryNotFoundError):
            raise NotOnHubError(said) from error
        raise (OutOfReachError if isinstance(error, LocalEntryNotFoundError) else ExpertcastError)(said) from error


def _said(name: HubName, kind: Kind, doing: str, error: Exception) -> str:
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    hub = constants.ENDPOINT
    if isinstance(error, GatedRepoError):
        return f"{name.repo} is for those who were given access: ask for it at {hub}/{name.repo}"
    if status == 401 and doing == "push to":
        return f"cannot push to {name.repo}: the hub knows no login of yours; {_LOGIN}"
    if status == 403:
        return f"cannot {doing} {name.repo}: your login has no right to; give another name, or use a token that has"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{str(name)!r} is neither a folder here nor a {kind.repo_type} repository that the hub shows: give the "
            f"folder of a {kind.what}, or user/repo (if that is private, {_LOGIN})"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{name.repo} of the hub has no revision {name.revision!r}: give a branch, a tag or a commit of it"
    if isinstance(error, LocalEntryNotFoundError):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{hub} is out of reach"
        return f"{str(name)!r} is neither a folder here nor in the hub's cache, and {why}: give a folder, or go online"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[0].rstrip(".;") if lines else type(error).__name__
    return f"cannot {doing} {name.repo}: {reason}; try again, what came whole is kept"


PARTIAL = ".partial"
"""Ends the name of a folder that is being downloaded."""


def located(given: str | Path, kind: Kind, revision: str | None = None) -> tuple[Path, HubName | None]:
    """The folder of that path; where there is none and it can be a repository's name, the repository, downloaded.

    Args:
        given: a path, or `user/repo`, or `user/repo@revision`.
        kind: what is looked for.
        revision: of the repository, in place of one in `given`.

    Returns:
        The folder, and the repository that it came from, if it did.

    Raises:
        ExpertcastError: a revision of a folder; or as :func:`download`.
    """
    name = None if os.path.lexists(given) else HubName.of(given)
    if name is None:
        if revision is not None:
            raise ExpertcastError(f"revision={revision!r} is of a repository, and {given} names none: leave it out")
        return Path(given), None
    name = name if revision is None else HubName(name.repo, revision)
    return download(name, kind), name


@contextmanager
def blamed(name: HubName | None, folder: Path, kind: Kind) -> Iterator[None]:
    """What is found wrong with a `folder` that was downloaded names the repository, and what helps."""
    try:
        yield
    except ExpertcastError as error:
        if name is None:
            raise
        raise _blame(name, folder, kind, error) from error


def download(name: HubName, kind: Kind) -> Path:
    """A repository's files in the hub's cache.

    Raises:
        ExpertcastError: no such repository or revision, something else in it, or no way to it and nothing in the cache.
    """
    return _whole(name, kind, _recognised(name, kind))


def pull(name: HubName, kind: Kind, folder: Path, check: Callable[[Path], object]) -> None:
    """Download a repository into a folder, which appears whole and checked or not at all. Files that a download which
    stopped has brought lie beside it, in `folder.partial`, until the next one.

    Args:
        name: of the repository.
        kind: what it holds.
        folder: to make.
        check: reads what was downloaded, and raises what is wrong with it.

    Raises:
        ExpertcastError: the folder is there and not empty; or as :func:`download` and `check`.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ExpertcastError(f"{folder} is there and not empty: give another folder")
    partial = folder.with_name(folder.name + PARTIAL)
    snapshot = _recognised(name, kind)
    _whole(name, kind, snapshot, partial)
    shutil.rmtree(partial / ".cache", ignore_errors=True)  # huggingface_hub's notes on the download
    try:
        check(partial)
    except ExpertcastError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise _blame(name, snapshot, kind, error) from error
    if folder.exists():
        folder.rmdir()
    partial.rename(folder)


def _recognised(name: HubName, kind: Kind) -> Path:
    """The snapshot of a repository in the hub's cache, with the small files by which a kind is told.

    Raises:
        ExpertcastError: as :func:`download`.
    """
    with in_one_line(name, kind, "get"):
        snapshot = snapshot_download(
            name.repo, repo_type=kind.repo_type, revision=name.revision, allow_patterns=list(kind.marks)
        )
    if not kind.holds(Path(snapshot)):
        raise ExpertcastError(f"{name} of the hub holds no {kind.what}: give another repository, or a folder")
    return Path(snapshot)


def _whole(name: HubName, kind: Kind, snapshot: Path, folder: Path | None = None) -> Path:
    """All files of that snapshot, there or in a folder of their own."""
    commit = snapshot.name  # whatever is pushed meanwhile
    with in_one_line(name, kind, "get"):
        found = snapshot_download(
            name.repo, repo_type=kind.repo_type, revision=commit, allow_patterns=list(kind.files), local_dir=folder
        )
    return Path(found)


def _blame(name: HubName, snapshot: Path, kind: Kind, error: ExpertcastError) -> ExpertcastError:
    # a snapshot lies two folders below the repository's, which holds the files that it links to
    remedy = f"remove {snapshot.parents[1]} to download it again, or tell its owner"
    return ExpertcastError(f"{name} of the hub: {str(error).replace(kind.remedy, remedy)}")


# Upload.

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
    """Send files to a repository in one commit; repository and branch are made where they are missing.

    Args:
        name: of the repository; its revision is a branch.
        kind: what is sent.
        content: path in the repository to a file, or to what is in it.
        private: whether nobody else may see it.
        message: of the commit.
        stale: of a path in the repository that is not in `content`, whether it goes.

    Returns:
        `repo`, `type`, `revision`, `commit`, `url`, `files` and `bytes`.

    Raises:
        ExpertcastError: no login, no right to write there, no way to the hub, a repository that holds something else,
            or one that everybody sees and was to be private.
    """
    api, where = HfApi(library_name="expertcast"), {"repo_id": name.repo, "repo_type": kind.repo_type}
    branch = name.revision or MAIN
    with in_one_line(name, kind, "push to"):
        held = _held(api, name, kind)
        if held is None:
            api.create_repo(**where, private=private or None)
        elif private and not api.repo_info(**where).private:
            raise ExpertcastError(f"{name.repo} is there and public: make it private on the hub, or leave private out")
        if branch != MAIN:
            api.create_branch(**where, branch=branch, exist_ok=True)
        added = [CommitOperationAdd(path, given) for path, given in content.items()]
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
    """Paths in a repository, at the branch or where that will begin; None where there is no repository.

    Raises:
        ExpertcastError: it holds something that is not of this kind.
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
            raise ExpertcastError(f"{name} of the hub holds something else than a {kind.what}: give another name")
    return held
