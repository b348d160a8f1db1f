"""Repositories of the Hugging Face hub that hold a checkpoint or traces: their names, and what goes wrong with them.

All that is done with them is huggingface_hub's, with its cache, its login and its environment variables (HF_TOKEN,
HF_ENDPOINT, HF_HUB_OFFLINE).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from expertcast.predictors.errors import ExpertcastError


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
