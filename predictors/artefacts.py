"""Reading what expertcast wrote: JSON files by their schema, and digests of the files beside them.

A file of ours is right or it is refused in one line that names file, field, what was found and what is allowed. Each
JSON file has one schema, a `typing_extensions.TypedDict` with `__pydantic_config__ = CLOSED`, in the module that writes
the file, and one loader there, which all commands use.

A sealed file has a member `digest` over its other members, and may name the digests of other files: so a bit that
flips in any of them is noticed. What was written before there were digests is read with a warning.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import stat
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import xxhash
from pydantic import ConfigDict, TypeAdapter, ValidationError

from expertcast.predictors.messages import ExpertcastError, Json

T = TypeVar("T")

CLOSED = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
"""For schemas: no other members, no other types, finite numbers."""

MOST_BYTES = 256 << 20
"""Of a file that is read whole: the description of ten million documents."""
MOST_NESTING = 32
SEAL = "digest"

_SHOWN = 60
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_CHUNK = 1 << 22
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""Half of a character in two escapes; without its other half it is a text that can be neither printed nor written."""
_ADAPTERS: dict[type, TypeAdapter[Any]] = {}


def open_file(path: Path) -> BufferedReader:
    """Open a regular file for reading. A pipe in its place is not waited for, a device not read.

    Raises:
        OSError: it cannot be read or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path) -> bytes:
    """The bytes of a regular file of at most `MOST_BYTES`.

    Raises:
        OSError: as :func:`open_file`, or the file is larger.
    """
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > MOST_BYTES:
            raise OSError(errno.EFBIG, f"More than {MOST_BYTES} bytes", str(path))
        return file.read()


def read_json(path: Path, schema: type[T], remedy: str) -> T:
    """The object in a JSON file.

    Args:
        path: of the file.
        schema: a TypedDict.
        remedy: what to do where the file is not right, for messages.

    Raises:
        ExpertcastError: no such file, no JSON object by this schema, or one that was changed after it was sealed.
    """
    try:
        data = read_bytes(path)
    except OSError as error:
        raise ExpertcastError(f"cannot read {path}: {error.strerror}; {remedy}") from error
    return parse_json(data, schema, str(path), remedy)


def parse_json(data: bytes | str, schema: type[T], what: str, remedy: str) -> T:
    """The same of a text that lies elsewhere, such as in a header; messages call it `what`.

    Raises:
        ExpertcastError: as :func:`read_json`.
    """
    values = _object(data, what, remedy)
    try:
        made: T = _adapter(schema).validate_python(values)
    except ValidationError as error:
        raise ExpertcastError(f"{what}: {_first(error)}; {remedy}") from None
    sealed = values.get(SEAL)
    if sealed is not None and sealed != _seal_of(values):
        raise ExpertcastError(f"{what} was changed after it was written; {remedy}")
    return made


def check_values(values: Mapping[str, object], schema: type[T], what: str, remedy: str) -> T:
    """The same of values that were read already, as part of a file; lists become the tuples that a schema asks for.

    Raises:
        ExpertcastError: the values are not by the schema.
    """
    try:
        made: T = _adapter(schema).validate_json(json.dumps(values))
    except ValidationError as error:
        raise ExpertcastError(f"{what}: {_first(error)}; {remedy}") from None
    return made


def seal(values: Mapping[str, object]) -> Json:
    """An object with the digest of its members, which must be JSON values."""
    return {**values, SEAL: _seal_of(values)}


def digest(data: bytes | memoryview) -> str:
    """xxh3 of some bytes, as files name it."""
    return "xxh3:" + xxhash.xxh3_128_hexdigest(data)


class DigestingFile(io.RawIOBase):
    """Passes on what is written to it, and takes the digest meanwhile: a large file need not be in memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._state = file, xxhash.xxh3_128()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._state.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Whoever opened the file closes it."""

    @property
    def digest(self) -> str:
        """As :func:`digest`, of all that was written so far."""
        return "xxh3:" + self._state.hexdigest()


def file_digest(path: Path) -> str:
    """The same of a file.

    Raises:
        OSError: it cannot be read.
    """
    state = xxhash.xxh3_128()
    with open_file(path) as file:
        while chunk := file.read(_CHUNK):
            state.update(chunk)
    return "xxh3:" + state.hexdigest()


def check_file(path: Path, expected: str, remedy: str) -> None:
    """Compare a file with the digest that was taken when it was written.

    Args:
        path: of the file.
        expected: as :func:`digest` gave it.
        remedy: for the message.

    Raises:
        ExpertcastError: it is not there, cannot be read, or has other bytes.
    """
    try:
        found = file_digest(path)
    except OSError as error:
        raise ExpertcastError(f"cannot read {path}: {error.strerror}; {remedy}") from error
    if found != expected:
        raise ExpertcastError(f"{path} was changed after it was written; {remedy}")


def _object(data: bytes | str, what: str, remedy: str) -> Json:
    try:
        text = data if isinstance(data, str) else data.decode()
        _check_nesting(text)
        values = json.loads(text, object_pairs_hook=_members, parse_constant=_no_number, parse_float=_finite)
        if _HALF.search(text):
            json.dumps(values, ensure_ascii=False).encode()
    except UnicodeDecodeError:
        raise ExpertcastError(f"{what} is no text in UTF-8; {remedy}") from None
    except ValueError as error:
        raise ExpertcastError(f"{what} is no JSON ({error}); {remedy}") from None
    if not isinstance(values, dict):
        raise ExpertcastError(f"{what} holds no JSON object; {remedy}")
    return values


def _check_nesting(text: str) -> None:
    """Brackets in texts count too: no file of ours comes near.

    Raises:
        ValueError: deeper than `MOST_NESTING`.
    """
    depth = 0
    for bracket in text.encode(errors="replace").translate(None, _NO_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        if depth > MOST_NESTING:
            raise ValueError(f"nested more than {MOST_NESTING} deep")


def _members(pairs: list[tuple[str, Any]]) -> Json:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return values


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:_SHOWN]} is too large a number")
    return value


def _seal_of(values: Mapping[str, object]) -> str:
    own = {name: value for name, value in values.items() if name != SEAL}
    return digest(json.dumps(own, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())


def _adapter(schema: type[T]) -> TypeAdapter[T]:
    """Made once: that takes milliseconds."""
    if schema not in _ADAPTERS:
        _ADAPTERS[schema] = TypeAdapter(schema)
    return _ADAPTERS[schema]


def _first(error: ValidationError) -> str:
    """What is wrong, of the first thing that is."""
    first = error.errors(include_url=False)[0]
    place = ".".join(map(_printable, first["loc"])) or "the object"
    if first["type"] == "missing":
        return f"{place} is missing"
    if first["type"] == "extra_forbidden":
        return f"{place} is no member that is known"
    return f"{place} is {_cut(repr(first['input']))}: {first['msg'][:1].lower()}{first['msg'][1:]}"


def _printable(part: int | str) -> str:
    """A part of a place, which may be any text that a file has for a name."""
    text = str(part)
    return _cut(text if text.isprintable() else repr(text))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
