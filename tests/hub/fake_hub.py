"""The HTTP interface of the Hugging Face hub, as far as huggingface_hub and `datasets` use it, on the loopback.

Repositories are in memory: branches, commits, regular and large files, public and private ones. Answers, headers and
error codes are the hub's own, read off what huggingface_hub asks for and how it reads the answers.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

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


class _RefusedError(Exception):
    """An answer that is no success."""

    def __init__(self, status: int, code: str = "", text: str = "") -> None:
        super().__init__(text)
        self.status, self.code, self.text = status, code, text


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self._body = self._read_body()
        self.hub.requests.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        try:
            self._route([part for part in path.split("/") if part])
        except _RefusedError as refused:
            headers = {"X-Error-Code": refused.code, "X-Error-Message": refused.text}
            self._send(json.dumps({"error": refused.text}).encode(), refused.status, headers)

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _route(self, parts: list[str]) -> None:
        if parts[:1] == ["lfs"]:
            return self._store(parts[1])
        if parts == ["api", "validate-yaml"]:
            return self._json({"errors": [], "warnings": []})
        if parts == ["api", "repos", "create"]:
            return self._create(json.loads(self._body))
        if parts[0] == "api":
            kind, name, rest = parts[1].removesuffix("s"), "/".join(parts[2:4]), parts[4:]
            return self._api(kind, name, self._repo(kind, name), rest)
        kind = "dataset" if parts[0] == "datasets" else "model"
        parts = parts[1:] if kind == "dataset" else parts
        name, rest = "/".join(parts[:2]), parts[2:]
        repo = self._repo(kind, name.removesuffix(".git"))
        if rest[:1] == ["resolve"]:
            return self._file(repo, rest[1], "/".join(rest[2:]))
        if rest == ["info", "lfs", "objects", "batch"]:
            self._may_write(name)
            wanted = json.loads(self._body)["objects"]
            upload = [{**each, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{each['oid']}"}}} for each in wanted]
            return self._json({"transfer": "basic", "objects": upload})
        raise _RefusedError(404, text=f"no such address: {parts}")

    def _api(self, kind: str, name: str, repo: Repo, rest: list[str]) -> None:
        what, revision = rest[0] if rest else "revision", rest[1] if len(rest) > 1 else "main"
        if what == "branch":
            self._may_write(name)
            if revision in repo.branches:
                raise _RefusedError(409, text="it is there")
            repo.branches[revision] = repo.branches["main"]
            return self._json({})
        sha = repo.branches.get(revision, revision)
        if sha not in repo.commits:
            raise _RefusedError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        tree = repo.commits[sha]
        if what == "revision":
            files = [{"rfilename": path} for path in tree]
            return self._json({"id": name, "sha": sha, "private": repo.private, "siblings": files, "tags": []})
        if what == "tree":
            below = "/".join([*rest[2:], ""])
            return self._json([entry(path, data) for path, data in sorted(tree.items()) if path.startswith(below)])
        if what == "paths-info":
            wanted = parse_qs(self._body.decode())["paths"]
            folders = [{"type": "directory", "path": path, "oid": sha} for path in wanted
                       if any(each.startswith(f"{path}/") for each in tree)]  # fmt: skip
            return self._json([*folders, *(entry(path, tree[path]) for path in wanted if path in tree)])
        self._may_write(name)
        if what == "preupload":
            return self._json({"files": [self._mode(each["path"], tree) for each in json.loads(self._body)["files"]]})
        if what == "commit":
            return self._commit(name, repo, revision, dict(tree))
        raise _RefusedError(404, text=f"no such address: {what}")

    def _mode(self, path: str, tree: Tree) -> dict[str, Any]:
        known = entry(path, tree[path]) if path in tree else {}
        large = path.endswith(LARGE)
        oid = known.get("lfs", {}).get("oid") if large else known.get("oid")
        return {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid}

    def _commit(self, name: str, repo: Repo, branch: str, tree: Tree) -> None:
        message = ""
        for line in self._body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                message = value["summary"]
            elif item["key"] == "file":
                tree[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                tree[value["path"]] = self.hub.objects[value["oid"]]
            elif item["key"] == "deletedFile":
                del tree[value["path"]]
        sha = repo.commit(branch, tree, message)
        self._json({"commitUrl": f"{self.hub.url}/{name}/commit/{sha}", "commitOid": sha})

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('organization') or USER}/{asked['name']}"
        self._may_write(name)
        key = asked.get("type", "model"), name
        if key in self.hub.repos:
            raise _RefusedError(409, text="You already created this repo")
        repo = self.hub.repos[key] = Repo(private=asked.get("visibility") == "private")
        repo.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")
        self._json({"url": f"{self.hub.url}/{name}", "id": name})

    def _store(self, oid: str) -> None:
        if hashlib.sha256(self._body).hexdigest() != oid:
            raise _RefusedError(400, text="other bytes than were announced")
        self.hub.objects[oid] = self._body
        self._send(b"")

    def _file(self, repo: Repo, revision: str, path: str) -> None:
        sha = repo.branches.get(revision, revision)
        if sha not in repo.commits:
            raise _RefusedError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        data = repo.commits[sha].get(path)
        if data is None:
            raise _RefusedError(404, "EntryNotFound", "Entry not found")
        known = entry(path, data)
        headers = {"ETag": f'"{known.get("lfs", known)["oid"]}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        if path in self.hub.changed:
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        begin, status = 0, 200
        if (asked := self.headers.get("Range", "")).startswith("bytes="):
            first, last = asked.removeprefix("bytes=").split("-")
            begin, end = int(first), min(int(last or len(data)), len(data) - 1)
            headers["Content-Range"], status = f"bytes {begin}-{end}/{len(data)}", 206
            data = data[begin : end + 1]
        if self.hub.cut_after is not None and begin:
            raise _RefusedError(410, text="gone")
        self._send(data, status, headers, self.hub.cut_after)

    def _repo(self, kind: str, name: str) -> Repo:
        repo = self.hub.repos.get((kind, name))
        if repo is None or (repo.private and self._token() not in (WRITER, READER)):
            raise _RefusedError(404 if self._token() else 401, "RepoNotFound", "Repository not found")
        return repo

    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _may_write(self, name: str) -> None:
        if self._token() not in (WRITER, READER):
            raise _RefusedError(401, text="Invalid username or password.")
        if self._token() != WRITER or name.split("/")[0] != USER:
            raise _RefusedError(403, text="You don't have the rights to this")

    def _json(self, values: object) -> None:
        self._send(json.dumps(values).encode(), headers={"Content-Type": "application/json"})

    def _send(
        self, data: bytes, status: int = 200, headers: dict[str, str] | None = None, most: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data)), "Connection": "close"}.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:most])
            self.close_connection = len(data) > len(data[:most])


def _listen(hub: FakeHub, port: int) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", port), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


@contextmanager
def served() -> Iterator[FakeHub]:
    """A hub without repositories, served while the block runs; its `away()` is a block in which nobody listens."""
    hub = FakeHub()
    server = _listen(hub, 0)
    port = server.server_address[1]
    hub.url = f"http://127.0.0.1:{port}"

    def close() -> None:
        server.shutdown()
        server.server_close()

    @contextmanager
    def away() -> Iterator[None]:
        nonlocal server
        close()
        try:
            yield
        finally:
            server = _listen(hub, port)

    hub.away = away
    try:
        yield hub
    finally:
        close()
