"""Checkpoints and traces into repositories of the hub."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, snapshot_download
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

from expertcast.checkpoints.repositories import HubName, Kind, in_one_line
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.plain import Json

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


def require_digests(folder: str | Path, named: bool, kind: Kind) -> None:
    """See that readers can check what is sent.

    Args:
        folder: of what is to be sent.
        named: whether it names digests of its files.
        kind: what it is.

    Raises:
        ExpertcastError: it does not: it is from before there were digests.
    """
    if not named:
        raise ExpertcastError(f"{folder} names no digests that readers could check its files by: {kind.remedy}")


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
