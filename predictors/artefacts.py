"""Read JSON files by schema, check digests of files, and write files atomically.

Each JSON file format has one schema, a `typing_extensions.TypedDict` with `__pydantic_config__ = CLOSED`, and one
loader, both in the module that writes the file. A file that violates its schema raises an error that names the file,
the field, the value and the allowed values.

A sealed JSON file stores a `digest` of its other fields, and may store digests of other files. A changed bit in any of
these files is an error.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
import xxhash
from pydantic import ConfigDict, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from expertcast.predictors.messages import ExpertcastError, Json, first_line

T = TypeVar("T")

CLOSED = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
"""Pydantic config of schemas: no extra fields, no type coercion, finite numbers only."""

MOST_BYTES = 256 << 20
"""Largest JSON file that is read: the description of ten million documents fits."""
MOST_NESTING = 32
SEAL = "digest"

_SHOWN = 60
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""Escaped surrogate: unpaired, it yields a string that can be neither printed nor encoded."""


def open_file(path: Path) -> BufferedReader:
    """Open a regular file for reading; a pipe in its place does not block.

    Raises:
        OSError: the file cannot be read or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path) -> bytes:
    """Read a regular file; raises OSError if it is unreadable, not regular, or larger than 256 MiB."""
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > MOST_BYTES:
            raise OSError(errno.EFBIG, f"More than {MOST_BYTES} bytes", str(path))
        return file.read()


def read_range(file: int, start: int, nbytes: int) -> memoryview:
    """Read bytes of an open file from `start`; fewer at the end of the file.

    A single read returns at most 2 GiB on Linux, and may return less on network file systems.
    """
    read, done = torch.empty(nbytes, dtype=torch.uint8).numpy().data, 0  # a bytearray would be cleared first
    while done < nbytes and (count := os.preadv(file, [read[done:]], start + done)):
        done += count
    return read[:done]


def read_json(path: Path, schema: type[T], remedy: str) -> T:
    """Read a JSON object, and check its schema and its digest.

    Args:
        path: JSON file.
        schema: a TypedDict.
        remedy: end of error messages.

    Raises:
        ExpertcastError: the file is missing, violates the schema, or changed after it was sealed.
    """
    try:
        data = read_bytes(path)
    except OSError as error:
        raise ExpertcastError(f"cannot read {path}: {error.strerror}; {remedy}") from error
    return parse_json(data, schema, str(path), remedy)


def parse_json(data: bytes | str, schema: type[T], what: str, remedy: str) -> T:
    """Parse a JSON object, and check its schema and its digest.

    Args:
        data: JSON text.
        schema: a TypedDict.
        what: name of the source in error messages.
        remedy: end of error messages.

    Raises:
        ExpertcastError: the text violates the schema, or changed after it was sealed.
    """
    values = _object(data, what, remedy)
    try:
        parsed: T = _adapter(schema).validate_python(values)  # type: ignore[arg-type]  # a class is hashable
    except ValidationError as error:
        raise ExpertcastError(f"{what}: {_first(error)}; {remedy}") from None
    sealed = values.get(SEAL)
    if sealed is not None and sealed != _seal_of(values):
        raise ExpertcastError(f"{what} was changed after it was written; {remedy}")
    return parsed


def seal(values: Mapping[str, object]) -> Json:
    """Return a copy of a JSON object with a `digest` of its fields."""
    return {**values, SEAL: _seal_of(values)}


def digest(data: bytes | memoryview) -> str:
    """Return the xxh3-128 digest of some bytes as `xxh3:HEX`."""
    return "xxh3:" + xxhash.xxh3_128_hexdigest(data)


def file_digest(path: Path) -> str:
    """Return the digest of a file in the form of :func:`digest`; raises OSError if it is unreadable."""
    with open_file(path) as file:
        return "xxh3:" + hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def check_file(path: Path, expected: str, remedy: str) -> None:
    """Compare a file with its recorded digest.

    Args:
        path: file to check.
        expected: digest in the form of :func:`digest`.
        remedy: end of error messages.

    Raises:
        ExpertcastError: the file is missing, unreadable, or differs.
    """
    try:
        found = file_digest(path)
    except OSError as error:
        raise ExpertcastError(f"cannot read {path}: {error.strerror}; {remedy}") from error
    if found != expected:
        raise ExpertcastError(f"{path} was changed after it was written; {remedy}")


# Tensors

_FLOATS = ("F64", "F32", "F16", "BF16")
_INTEGERS = ("I64", "I32", "I16", "I8", "U8", "BOOL")


def read_tensors(path: Path, like: Mapping[str, Tensor], remedy: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors of a safetensors file to the CPU, and the text of its header.

    Args:
        path: the file.
        like: tensors of the expected names, shapes and kinds (floating or integer) on any device.
        remedy: end of error messages.

    Raises:
        ExpertcastError: the file is unreadable, has other tensors, or contains NaN or infinity.
    """
    try:
        open_file(path).close()
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            if names != set(like):
                odd = sorted(names ^ set(like))[0]
                raise ExpertcastError(
                    f"{path} {'lacks' if odd in like else 'has unexpected'} tensor {odd[:60]!r}; {remedy}"
                )
            for name, tensor in like.items():
                part = file.get_slice(name)
                kinds = _FLOATS if tensor.is_floating_point() else _INTEGERS
                if part.get_shape() != list(tensor.shape) or part.get_dtype() not in kinds:
                    raise ExpertcastError(
                        f"{path}: tensor {name} is {part.get_dtype()} {part.get_shape()}, expected "
                        f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}; {remedy}"
                    )
            tensors = {name: file.get_tensor(name) for name in like}
            notes = dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise ExpertcastError(f"cannot read {path}: {first_line(error)}; {remedy}") from error
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not is_finite(tensor):
            raise ExpertcastError(f"{path}: tensor {name} contains NaN or infinity; {remedy}")
    return tensors, notes


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor has neither NaN nor infinity, in one pass without a copy."""
    return not tensor.numel() or all(math.isfinite(value) for value in torch.stack(tensor.aminmax()).tolist())


# Atomic writes

_PARTIAL = re.compile(r"(.+)\.[0-9a-f]{8}\.partial")


def final_name(name: str) -> str:
    """Return the name that a temporary file would have got; other names are returned as they are."""
    found = _PARTIAL.fullmatch(name)
    return found[1] if found else name


def create_partial(path: Path) -> tuple[Path, BinaryIO]:
    """Create a temporary file beside `path`, locked until it is closed, and remove those of killed processes."""
    remove_left_over(path)
    while True:  # another process may remove the file before it is locked
        partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
        file = partial.open("x+b")
        try:
            with contextlib.suppress(OSError):  # a file system without locks, where no file is removed
                fcntl.flock(file, fcntl.LOCK_EX)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        if partial.exists():
            return partial, file
        file.close()


def remove_left_over(path: Path) -> None:
    """Remove the temporary files of `path` that killed processes left."""
    for partial in path.parent.glob(f"{glob.escape(path.name)}.*.partial"):
        if final_name(partial.name) == path.name:
            with contextlib.suppress(OSError), locked(partial):
                partial.unlink()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a file or folder until the block ends; raises OSError if another process holds its lock."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Replace a file atomically."""
    with replacing(path) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path`, or the file behind a link, once it is completely on disk."""
    path = Path(os.path.realpath(path))
    partial, file = create_partial(path)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(partial, path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # writing names no file, and renaming the temporary one
        raise


def write_user_file(path: Path, content: bytes) -> None:
    """Write a file atomically at a path chosen by the user. A device or a pipe, such as /dev/null, is not replaced.

    Raises:
        ExpertcastError: the folder does not exist or is not writable, or the disk is full.
    """
    write = Path.write_bytes if path.exists() and not path.is_file() else write_atomically
    try:
        write(path, content)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "free some space, or use a path on another disk" if full else "use a path in an existing folder"
        raise ExpertcastError(f"cannot write {path}: {error.strerror}; {remedy}") from error


def _object(data: bytes | str, what: str, remedy: str) -> Json:
    try:
        text = data if isinstance(data, str) else data.decode()
        if "\\u0000" in text:
            raise ValueError("NUL in a text")
        _check_nesting(text)
        values = json.loads(text, object_pairs_hook=_members, parse_constant=_no_number, parse_float=_finite)
        if _HALF.search(text):
            json.dumps(values, ensure_ascii=False).encode()
    except UnicodeDecodeError:
        raise ExpertcastError(f"{what} is not UTF-8 text; {remedy}") from None
    except ValueError as error:
        raise ExpertcastError(f"{what} is not valid JSON ({error}); {remedy}") from None
    if not isinstance(values, dict):
        raise ExpertcastError(f"{what} is not a JSON object; {remedy}")
    return values


def _check_nesting(text: str) -> None:
    # brackets inside strings count too: no expertcast file comes near the limit
    depth = 0
    for bracket in text.encode(errors="replace").translate(None, _NO_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        if depth > MOST_NESTING:
            raise ValueError(f"nested more than {MOST_NESTING} deep")


def _members(pairs: list[tuple[str, Any]]) -> Json:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate key {next(name for name in names if names.count(name) > 1)!r}")
    return values


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:_SHOWN]} overflows")
    return value


def _seal_of(values: Mapping[str, object]) -> str:
    own = {name: value for name, value in values.items() if name != SEAL}
    return digest(json.dumps(own, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())


@cache
def _adapter(schema: type) -> TypeAdapter[Any]:
    return TypeAdapter(schema)  # takes milliseconds


def _first(error: ValidationError) -> str:
    """Describe the first of the validation errors."""
    first = error.errors(include_url=False)[0]
    place = ".".join(map(_printable, first["loc"])) or "the object"
    if first["type"] == "missing":
        return f"{place} is missing"
    if first["type"] == "extra_forbidden":
        return f"unknown field {place}"
    return f"{place} is {_cut(repr(first['input']))}: {first['msg'][:1].lower()}{first['msg'][1:]}"


def _printable(part: int | str) -> str:
    # the name of a field in the file may be any string
    text = str(part)
    return _cut(text if text.isprintable() else repr(text))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
