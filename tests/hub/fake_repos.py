"""What the fake hub knows: repositories, their commits and files, and how it is to fail."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

WRITER, READER = "hf_writer", "hf_reader"
"""Tokens of the user `me`: the second may only read."""
USER = "me"
LARGE = (".safetensors", ".arrow")
"""What goes by the protocol for large files."""

Tree = dict[str, bytes]


@dataclass
class Repo:
    """A repository."""

    private: bool
    commits: dict[str, Tree] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, tree: Tree, message: str) -> str:
        """A new commit on a branch; returns its id."""
        self.messages.append(message)
        sha = hashlib.sha1(f"{len(self.commits)} {branch} {message}".encode()).hexdigest()
        self.commits[sha] = tree
        self.branches[branch] = sha
        return sha


@dataclass
class FakeHub:
    """What the server knows, and how it is to fail."""

    url: str = ""
    repos: dict[tuple[str, str], Repo] = field(default_factory=dict)
    """By type (model, dataset) and id."""
    objects: Tree = field(default_factory=dict)
    """Large files by their SHA-256."""
    requests: list[str] = field(default_factory=list)
    """Method and path of each."""
    cut_after: int | None = None
    """Bytes of a file after which the connection breaks, and the rest cannot be had; None: never."""
    changed: set[str] = field(default_factory=set)
    """Paths whose files arrive with another byte in the middle."""
    away: Callable[[], AbstractContextManager[None]] = nullcontext
    """Makes a block in which connections are refused."""

    def tree(self, kind: str, name: str, branch: str = "main") -> Tree:
        """The files at the end of a branch."""
        repo = self.repos[kind, name]
        return repo.commits[repo.branches[branch]]


def git_id(data: bytes) -> str:
    """Git's id of a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def entry(path: str, data: bytes) -> dict[str, Any]:
    """A file as the hub lists it."""
    shown: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": git_id(data)}
    if path.endswith(LARGE):
        shown["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return shown
