"""JSON files by their schema, and digests: one line for whatever is wrong."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
from pathlib import Path
from typing import Annotated, Any, NotRequired

import pytest
from pydantic import Field
from typing_extensions import TypedDict

from expertcast.predictors import ExpertcastError
from expertcast.predictors.artefacts import (
    CLOSED,
    check_file,
    digest,
    file_digest,
    read_json,
    remove_left_over,
    replacing,
    seal,
    write_atomically,
    write_user_file,
)
from tests.irregular import IRREGULAR, in_seconds, put


class _Shape(TypedDict):
    __pydantic_config__ = CLOSED  # type: ignore[misc]
    layers: Annotated[int, Field(ge=1, le=10_000)]


class _Made(TypedDict):
    __pydantic_config__ = CLOSED  # type: ignore[misc]
    name: str
    share: float
    shape: _Shape
    others: NotRequired[list[str]]
    digest: NotRequired[str]


GOOD: dict[str, Any] = {"name": "n", "share": 0.5, "shape": {"layers": 3}, "others": ["a"]}


def read(path: Path, content: bytes) -> _Made:
    path.write_bytes(content)
    return read_json(path, _Made, "make it again")


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "made.json"
    assert read(path, json.dumps(GOOD).encode()) == GOOD
    sealed = seal(GOOD)
    assert read(path, json.dumps(sealed, indent=2).encode()) == sealed
    assert read(path, json.dumps(seal(sealed)).encode()) == sealed


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "is not valid JSON"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"[1]", "is not a JSON object"),
        (b"{} {}", "is not valid JSON"),
        (b'{"name": "n"', "is not valid JSON"),
        (b"[" * 100_000, "nested more than 32 deep"),
        (b'{"a":' * 1000 + b"1" + b"}" * 1000, "nested more than 32 deep"),
        (json.dumps(GOOD | {"name": 3}).encode(), "name is 3: input should be a valid string"),
        (json.dumps(GOOD | {"share": "0.5"}).encode(), "share is '0.5': input should be a valid number"),
        (json.dumps(GOOD | {"share": float("nan")}).encode(), "NaN is not a number"),
        (json.dumps(GOOD).replace("0.5", "1e999").encode(), "1e999 overflows"),
        (json.dumps(GOOD | {"shape": {"layers": 0}}).encode(), "shape.layers is 0: input should be greater than or"),
        (json.dumps(GOOD | {"shape": {"layers": 10**30}}).encode(), "shape.layers is 10000"),
        (json.dumps(GOOD | {"shape": {}}).encode(), "shape.layers is missing"),
        (json.dumps(GOOD | {"more": 1}).encode(), "unknown field more"),
        (json.dumps(GOOD)[:-1].encode() + b', "name": "m"}', "duplicate key 'name'"),
        (json.dumps(seal(GOOD)).replace("0.5", "0.6").encode(), "was changed after it was written"),
    ],
)
def test_what_is_wrong_is_one_line(content: bytes, line: str, tmp_path: Path) -> None:
    with pytest.raises(ExpertcastError) as caught:
        read(tmp_path / "made.json", content)
    message = str(caught.value)
    assert line in message
    assert message.startswith(str(tmp_path / "made.json"))
    assert message.endswith("; make it again")
    assert "\n" not in message
    assert len(message) < 400


def test_every_bit_of_a_sealed_file_counts(tmp_path: Path) -> None:
    """But for blanks, and the escapes of a text, which say the same."""
    content = json.dumps(seal(GOOD)).encode()
    silent = []
    for place in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            try:
                silent.append(read(tmp_path / "made.json", bytes(changed)))
            except ExpertcastError:
                continue
    assert all(made == seal(GOOD) for made in silent)


def test_files_by_their_digests(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"x" * 10_000_000)
    assert file_digest(path) == digest(b"x" * 10_000_000)
    check_file(path, file_digest(path), "make it again")
    path.write_bytes(b"x" * 9_999_999 + b"y")
    with pytest.raises(ExpertcastError, match="was changed after it was written; make it again"):
        check_file(path, digest(b"x" * 10_000_000), "make it again")
    with pytest.raises(ExpertcastError, match=r"cannot read .*No such file"):
        check_file(tmp_path / "none", "", "make it again")
    with pytest.raises(ExpertcastError, match=r"cannot read .*No such file"):
        read_json(tmp_path / "none", _Made, "make it again")


@pytest.mark.parametrize("kind", IRREGULAR)
def test_only_files_are_read(kind: str, tmp_path: Path) -> None:
    """A pipe was waited on for ever, and an endless file read until memory was full."""
    path = tmp_path / "made.json"
    put(kind, path)
    with in_seconds(20):
        with pytest.raises(ExpertcastError, match=r"^cannot read .*made.json: .*; make it again$"):
            read_json(path, _Made, "make it again")
        with pytest.raises(ExpertcastError, match=r"^cannot read .*made.json: .*; make it again$"):
            check_file(path, digest(b""), "make it again")


def test_two_may_replace_one_file(tmp_path: Path) -> None:
    """Each has a temporary file of its own; the last one to end wins, and nothing else is left."""
    path = tmp_path / "r[1].json"
    with replacing(path) as first:
        first.write(b"first")
        with replacing(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    """But not what another process is writing, nor the user's own files."""
    path, own = tmp_path / "r[1].json", tmp_path / "r[1].json.my.partial"
    own.touch()
    if (child := os.fork()) == 0:
        with replacing(path):
            os._exit(0)
    os.waitpid(child, 0)
    assert len(list(tmp_path.iterdir())) == 2
    with replacing(path) as held:
        held.write(b"held")
        write_atomically(path, b"other")
    assert path.read_bytes() == b"held"
    assert sorted(tmp_path.iterdir()) == [path, own]


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    with replacing(tmp_path / "r.json") as file:
        file.write(b"first")
        write_atomically(tmp_path / "r.json", b"second")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("r.json", b"first")]


def test_a_temporary_file_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its creation and its lock, another process takes it for one that was left behind."""
    lock = fcntl.flock

    def late(file: Any, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        remove_left_over(tmp_path / "r.json")
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    write_atomically(tmp_path / "r.json", b"whole")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("r.json", b"whole")]


def test_a_full_disk(tmp_path: Path) -> None:
    """The file is named, with a remedy, and its old contents stay."""
    with pytest.raises(ExpertcastError, match="cannot write /dev/full: No space left on device; free some space"):
        write_user_file(Path("/dev/full"), b"content")
    path = tmp_path / "r.json"
    path.write_bytes(b"old")
    if (child := os.fork()) == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        try:
            write_atomically(path, bytes(1000))
        except OSError as error:
            os._exit(error.filename == str(path))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("r.json", b"old")]
