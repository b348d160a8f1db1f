"""Checkpoints and traces out of repositories of the hub: into its cache, wherever a folder is asked for, or a folder.

Where the hub is out of reach, what is in the cache is taken. Files that came whole are not asked for again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import snapshot_download

from expertcast.checkpoints.repositories import HubName, Kind, in_one_line
from expertcast.predictors.errors import ExpertcastError

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
