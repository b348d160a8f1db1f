"""What can be a repository's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from expertcast.checkpoints.hub import HubName


@pytest.mark.parametrize(
    ("given", "repo", "revision"),
    [
        ("user/repo", "user/repo", None),
        (Path("user/repo@main"), "user/repo", "main"),
        ("u-1/r_2.x@refs/pr/3", "u-1/r_2.x", "refs/pr/3"),
        (f"user/repo@{'a' * 40}", "user/repo", "a" * 40),
    ],
)
def test_names(given: str | Path, repo: str, revision: str | None) -> None:
    name = HubName.of(given)
    assert name == HubName(repo, revision)
    assert str(name) == str(given)


@pytest.mark.parametrize(
    "given",
    ["", "repo", "a/b/c", "/a/b", "./repo", "../repo", "~/repo", "user/", "user/repo@", "user/repo@a b", "user/re po",
     "user/repo@a@b", "user/-repo", "user/a--b", "user/" + "r" * 97, "user\0/repo"],
)  # fmt: skip
def test_no_names(given: str) -> None:
    assert HubName.of(given) is None
