"""File of a store on disk: the experts of a model, each encoded by a codec.

    [ header, whole sectors | parts of expert 0 | parts of expert 1 | ... | index ]

It is a safetensors file with the tensor `parts` (uint8, all bytes of the experts) and an index: `offsets`, `nbytes` and
`digests` [N, P]. Each part begins at a sector. The parts of one expert are adjacent, so that one request can read
several. Codec `raw` has one part, the block itself, and no gaps between blocks. A file is written under a temporary
name and renamed when it is complete.

N experts of all layers, P parts of each, L MoE layers, E routed experts per layer.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from io import FileIO
from pathlib import Path
from typing import Annotated, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, TypeAdapter
from torch import Tensor

from expertcast.predictors.artefacts import create_partial, digest, open_file, read_range
from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.storage.codecs import Part
from expertcast.runtime.storage.layout import SECTOR, BlockLayout, sectors
from expertcast.runtime.storage.reader import HANDLES, stamp_of

FILE_NAME = "experts.safetensors"
REMEDY = "remove it or give another store_folder"
_FORMAT = "expertcast-experts-1"
_BEGIN = f'{{"__metadata__": {{"format": "{_FORMAT}'.encode()
_MOST_HEADER = 1 << 22
"""Maximum bytes of a header."""
_MOST = 10**15
"""Maximum bytes of a file; the header reserves room for this number."""
_WORD = 8
"""Bytes of a number in the index."""
_SET_BACK_S = 60
"""Seconds by which a complete file's modification time is set back, so that any later change alters it."""

_Count = Annotated[int, Field(ge=1, le=10**12)]


class StaleFileError(Exception):
    """A store's file is damaged, incomplete or of other experts, and must be rebuilt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Contents of a file's header. Headers compare equal if their files hold the same experts in the same form."""

    layers: _Count
    experts: _Count
    block_bytes: _Count
    """Bytes of an expert in memory."""
    layout: str
    """Fields of a block, as the text of :func:`layout_text`."""
    fingerprint: str
    """Fingerprint of the weights that the experts come from."""
    codec: str
    """Name of the codec."""
    parts: Annotated[int, Field(ge=1, le=10**4)]
    """P"""
    model_id: str = field(compare=False)
    nbytes: Annotated[int, Field(ge=1, le=_MOST)] = field(default=_MOST, compare=False)
    """Bytes of all experts' parts, padding included."""
    index: str = field(default="f" * 100, compare=False)
    """Digest of the index."""
    changed: Annotated[int, Field(ge=0, lt=10**12)] = field(default=10**12 - 1, compare=False)
    """Modification time of the file in seconds since 1970; another one shows that the file was changed."""

    @property
    def plain(self) -> bool:
        """Whether each part is an unencoded block, without gaps between blocks."""
        return self.codec == "raw"

    @property
    def count(self) -> int:
        """N"""
        return self.layers * self.experts

    @property
    def index_nbytes(self) -> int:
        """Bytes of the index, which holds offset, size and digest of each part."""
        return 3 * _WORD * self.count * self.parts

    @property
    def room(self) -> int:
        """Bytes of the header and offset of the first part; independent of the values known only at the end."""
        known = {"nbytes": _MOST, "index": "f" * 100, "changed": 10**12 - 1}
        return sectors(8 + len(replace(self, **known)._text()))  # type: ignore[arg-type]

    def encoded(self) -> bytes:
        """Encode as length and JSON, padded with spaces to `room` bytes. Equal contents give equal bytes."""
        size = self.room - 8
        return size.to_bytes(8, "little") + self._text().ljust(size)

    def _text(self) -> bytes:
        said = json.dumps(asdict(self))
        entries: dict[str, object] = {
            "__metadata__": {"format": _FORMAT, "header": said, "digest": digest(said.encode())},
            "parts": {"dtype": "U8", "shape": [self.nbytes], "data_offsets": [0, self.nbytes]},
        }
        start, size = self.nbytes, self.index_nbytes // 3
        for name, dtype in (("offsets", "I64"), ("nbytes", "I64"), ("digests", "U64")):
            shape = [self.count, self.parts]
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}
            start += size
        return json.dumps(entries).encode()


_HEADER = TypeAdapter(Header)


def layout_text(layout: BlockLayout) -> str:
    """Return a block's fields, per layer if layers differ, as the header's JSON text."""
    texts = [
        [asdict(entry) | {"dtype": str(entry.dtype)} for entry in own] for own in layout.by_layer or [layout.fields]
    ]
    return json.dumps(texts if layout.by_layer else texts[0])


def read_header(path: Path) -> Header:
    """Read the header of a file, and check the file's length against it.

    Raises:
        ExpertcastError: expertcast did not write the file, or it cannot be read.
        StaleFileError: the file is damaged.
    """
    try:
        with open_file(path) as file:
            begin = file.read(_MOST_HEADER)
    except OSError as error:
        raise ExpertcastError(f"cannot read {str(path)!r}: {error.strerror}; {REMEDY}") from error
    if not begin[8:].startswith(_BEGIN):
        raise ExpertcastError(f"{str(path)!r} was not written by expertcast or is damaged: {REMEDY}")
    try:
        metadata = json.loads(begin[8 : 8 + int.from_bytes(begin[:8], "little")])["__metadata__"]
        header = _HEADER.validate_json(metadata["header"], strict=True)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise StaleFileError("its header is damaged") from None
    if not begin.startswith(header.encoded()):
        raise StaleFileError("its header is damaged")
    found, expected = path.stat().st_size, header.room + header.nbytes + header.index_nbytes
    if found != expected:
        raise StaleFileError(f"it has {found} bytes instead of {expected}")
    return header


def check_room(folder: Path, least: int) -> None:
    """Check that the disk of a folder, which may not exist yet, has `least` bytes of free space.

    Raises:
        ExpertcastError: it has less.
    """
    there = next((each for each in (folder, *folder.parents) if each.exists()), folder)
    free = shutil.disk_usage(there).free
    if free < least:
        raise ExpertcastError(
            f"{str(folder)!r} has {free} bytes free, but the experts need at least {least}: free some, or give "
            "another store_folder or codec"
        )


class ExpertWriter:
    """Writes a file, expert by expert in the order of their keys. Flushed experts can be read until it is dropped.

    Args:
        path: path of the complete file. None: the file has no name, is in the system's temporary folder, and is deleted
            when no process has it open any more, even after a kill.
        header: header without the values that are known only at the end.
        least: lower bound of the bytes of all experts' parts, to check the free space.

    Raises:
        ExpertcastError: the folder cannot be written, or has too little free space.
    """

    def __init__(self, path: Path | None, header: Header, least: int = 0) -> None:
        self._target, self._header = path, header
        self._folder = Path(tempfile.gettempdir()) if path is None else path.parent
        self._index: list[tuple[list[int], list[int], list[int]]] = []
        self._path: Path | None = None
        self._file: BinaryIO | None = None
        self._direct: FileIO | None = None
        """Second handle that writes past the page cache; None if the file system has no direct writes."""
        try:
            with self._system_errors():
                self._create()
                check_room(self._folder, least)
                weakref.finalize(self, self._open.close)
                self._open.write(bytes(header.room))
                self._direct = _open_direct(self._open.fileno())
        except BaseException:  # also after an interrupt, which would leave an empty file
            self.drop()
            raise

    def _create(self) -> None:
        """Create and lock an empty file for writing and reading."""
        if self._target is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed by drop)
            self._path = HANDLES / str(self._file.fileno())
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path, self._file = create_partial(self._target)

    def add(self, parts: Sequence[Part]) -> None:
        """Append the parts of the next expert.

        Raises:
            ExpertcastError: the file cannot be written, for instance since the disk is full.
        """
        offsets = []
        with self._system_errors():
            for part in parts:
                offsets.append(self._open.tell())
                self._write(part.data)
                if not self._header.plain:
                    self._open.write(bytes(-len(part.data) % SECTOR))
        self._index.append((offsets, [len(part.data) for part in parts], [part.digest or 0 for part in parts]))

    def _write(self, data: Tensor) -> None:
        """Write bytes; whole sectors bypass the page cache, since filling its pages takes longer than the disk."""
        view, start = data.numpy().data, self._open.tell()
        if self._direct is None or start % SECTOR or len(view) % SECTOR or data.data_ptr() % SECTOR:
            self._open.write(view)
            return
        self._direct.seek(start)
        while len(view):
            view = view[self._direct.write(view) :]
        self._open.seek(self._direct.tell())

    def flush(self) -> None:
        """Pass buffered bytes to the system, so that :meth:`read` returns all experts added so far.

        Raises:
            ExpertcastError: the file cannot be written, for instance since the disk is full.
        """
        with self._system_errors():
            self._open.flush()

    def read(self, key: int) -> list[Part]:
        """Read an expert that was added and flushed; recovers weights after packing failed."""
        return _read(self._open.fileno(), *self._index[key])

    def commit(self) -> ExpertFile:
        """Write the index and the header once all experts are added, rename the file, and open it.

        Raises:
            ExpertcastError: the file cannot be written, for instance since the disk is full.
        """
        assert self._path is not None
        numbers = zip(*self._index, strict=True)
        index = b"".join(
            np.array(own, dtype).tobytes() for own, dtype in zip(numbers, ("<i8", "<i8", "<u8"), strict=True)
        )
        file = self._open
        with self._system_errors():
            nbytes, changed = file.tell() - self._header.room, int(time.time()) - _SET_BACK_S
            file.write(index)
            file.seek(0)
            file.write(replace(self._header, nbytes=nbytes, index=digest(index), changed=changed).encoded())
            file.flush()
            os.fsync(file.fileno())
            os.utime(file.fileno(), (changed, changed))
            complete = ExpertFile(self._path)  # opened before another process can replace the renamed file
            if self._target is None:
                complete.path = HANDLES / str(complete.handle)
            else:
                os.replace(self._path, self._target)
                complete.path = self._target
            self._close()
        return complete

    def drop(self) -> None:
        """Remove the file, unless it is complete."""
        if self._file is not None:
            if self._file.closed:
                return
            with contextlib.suppress(OSError):  # the disk may have no room for the buffered bytes
                self._close()
        if self._target is not None and self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _close(self) -> None:
        if self._direct is not None:
            self._direct.close()
        self._open.close()

    @property
    def _open(self) -> BinaryIO:
        assert self._file is not None
        return self._file

    @contextlib.contextmanager
    def _system_errors(self) -> Iterator[None]:
        """Raise errors of the system as ExpertcastError. Flushed bytes can still be read afterwards."""
        try:
            yield
        except OSError as error:
            raise ExpertcastError(
                f"cannot write to {str(self._folder)!r} ({error.strerror or error}): give another store_folder"
            ) from error


def _open_direct(descriptor: int) -> FileIO | None:
    """Open a file a second time, for direct writes; None if system or file system does not support them."""
    with contextlib.suppress(OSError, AttributeError):
        return FileIO(os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_DIRECT), "w")
    return None


class ExpertFile:
    """A complete file, open for reading, with its index.

    Blocks of codec `raw` are not verified when they are used. So all of them are verified here if the file's
    modification time differs from the header's.

    Raises:
        ExpertcastError: expertcast did not write the file, or it cannot be read.
        StaleFileError: the file must be rebuilt, for the reason in its text.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = header = read_header(path)
        self.handle = os.open(path, os.O_RDONLY)
        """Descriptor of the file; remains valid if another file replaces it at `path`."""
        weakref.finalize(self, os.close, self.handle)
        raw = read_range(self.handle, header.room + header.nbytes, header.index_nbytes)
        if digest(raw) != header.index:  # damaged, or replaced since the header was read
            raise StaleFileError("its index is damaged")
        numbers = np.frombuffer(raw, "<i8").reshape(3, header.count, header.parts)
        self.offsets: npt.NDArray[np.int64] = numbers[0]
        """Offset of each part in the file, [N, P]."""
        self.nbytes: npt.NDArray[np.int64] = numbers[1]
        """Bytes of each part, [N, P]."""
        self.digests: npt.NDArray[np.uint64] = numbers[2].view("<u8")
        """Digest of each part, [N, P]."""
        ends = self.offsets + self.nbytes
        if (self.nbytes < 1).any() or (self.offsets < header.room).any() or ends.max() > header.room + header.nbytes:
            raise StaleFileError("its index is damaged")
        if header.plain and os.fstat(self.handle).st_mtime != header.changed:
            self.verify()
            with contextlib.suppress(OSError):  # without permission, every open verifies the file
                os.utime(self.handle, (header.changed, header.changed))
        self.stamp = stamp_of(self.handle)
        """Size in bytes and modification time in nanoseconds of the file when it was opened."""

    def verify(self) -> None:
        """Compare every part with its digest.

        Raises:
            StaleFileError: a part is damaged.
        """
        for key in range(self.header.count):
            for index, part in enumerate(self.read(key)):
                if not part.intact():
                    raise StaleFileError(f"part {index} of expert {key} is damaged")

    def read(self, key: int) -> list[Part]:
        """Read an expert's parts, without verifying their digests."""
        return _read(self.handle, self.offsets[key].tolist(), self.nbytes[key].tolist(), self.digests[key].tolist())


def _read(handle: int, offsets: list[int], sizes: list[int], digests: list[int]) -> list[Part]:
    """Read one expert's adjacent parts in one call; thread-safe."""
    nbytes = offsets[-1] + sizes[-1] - offsets[0]
    raw = read_range(handle, offsets[0], nbytes)
    if len(raw) < nbytes:
        raise OSError("it was truncated")
    data = torch.frombuffer(raw, dtype=torch.uint8)
    parts = [data[start - offsets[0] :][:size] for start, size in zip(offsets, sizes, strict=True)]
    return [Part(part, digest) for part, digest in zip(parts, digests, strict=True)]


def packed_codec(folder: Path) -> str | None:
    """Return the name of the codec of the store in a folder; None if the folder has no store.

    Raises:
        ExpertcastError: the file is damaged, or expertcast did not write it.
    """
    path = folder / FILE_NAME
    if not path.exists():
        return None
    try:
        return read_header(path).codec
    except StaleFileError as reason:
        raise _damaged(path, reason) from None


def verify_store(path: Path) -> None:
    """Verify the whole file of a store against its digests.

    Args:
        path: the file, or its folder.

    Raises:
        ExpertcastError: the file is missing or damaged, or expertcast did not write it.
    """
    path = path / FILE_NAME if path.is_dir() else path
    try:
        ExpertFile(path).verify()
    except StaleFileError as reason:
        raise _damaged(path, reason) from None


def _damaged(path: Path, reason: StaleFileError) -> ExpertcastError:
    return ExpertcastError(f"{str(path)!r} is damaged: {reason}; remove it, and the next load packs the experts again")
