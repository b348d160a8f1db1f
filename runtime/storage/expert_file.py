"""The file of a store on disk: the experts of a model, each as a codec makes it.

    [ header, whole sectors | parts of expert 0 | parts of expert 1 | ... | index ]

It is a safetensors file: `parts` (uint8, all bytes of the experts) and the index, `offsets`, `nbytes` and `digests`
[N, P]. Parts of a codec each begin at a sector, and the parts of one expert lie one after another, so that all of them,
or some neighbours, are one request. Codec `raw` has one part, the block itself; blocks follow each other without gaps,
so that a layer can be mapped. A file is written under another name and renamed when it is complete.

N experts of all layers, P parts of each, L MoE layers, E routed experts per layer.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import mmap
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from io import FileIO
from pathlib import Path
from typing import Annotated, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, TypeAdapter
from torch import Tensor

from expertcast.data.trace_format import read_range
from expertcast.predictors.artefacts import digest, open_file
from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.storage.codecs import Part
from expertcast.runtime.storage.layout import BlockLayout
from expertcast.runtime.storage.reader import SECTOR, sectors, stamp_of

FILE_NAME = "experts.safetensors"
PARTIAL = ".partial"
REMEDY = "remove it or give another store_folder"
_FORMAT = "expertcast-experts-1"
_ANY_VERSION = b'{"__metadata__": {"format": "expertcast-'
_HANDLES = Path("/dev/fd")
"""Where a process finds the files that it has open, also those without a name."""
_NUMBER = itertools.count()
_MOST_HEADER = 1 << 22
"""Bytes."""
_MOST = 10**15
"""Bytes: no file is larger, and the header has room for the number."""
_WORD = 8
"""Bytes of a number in the index."""
_LAST_MINUTE = 60
"""Seconds that a file's time of change is set back: whoever changes it later also changes that."""

_Count = Annotated[int, Field(ge=1, le=10**12)]


class StaleFileError(Exception):
    """The file is ours, but not of these weights, incomplete or damaged: it must be made again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """All that a header says; equal where the experts are."""

    layers: _Count
    experts: _Count
    block_bytes: _Count
    """Bytes of an expert in memory."""
    layout: str
    """A block's fields, as :func:`layout_text` says them."""
    fingerprint: str
    """Fingerprint of the weights' origin."""
    codec: str
    """As :attr:`expertcast.runtime.storage.codecs.Codec.text` says it."""
    parts: Annotated[int, Field(ge=1, le=10**4)]
    """P"""
    model_id: str = field(compare=False)
    nbytes: Annotated[int, Field(ge=1, le=_MOST)] = field(default=_MOST, compare=False)
    """Bytes of all experts' parts, padding included."""
    index: str = field(default="f" * 100, compare=False)
    """Digest of the index."""
    changed: Annotated[int, Field(ge=0, lt=10**12)] = field(default=10**12 - 1, compare=False)
    """Seconds since 1970: the file's time of change, as long as no process changes it."""

    @property
    def plain(self) -> bool:
        """Whether parts are blocks as they are, without gaps between them."""
        return self.codec == "raw"

    @property
    def count(self) -> int:
        """N"""
        return self.layers * self.experts

    @property
    def index_nbytes(self) -> int:
        """Bytes of the index: of each part its first byte in the file, its bytes and its digest."""
        return 3 * _WORD * self.count * self.parts

    @property
    def room(self) -> int:
        """Bytes of the header, the same whatever is known only at the end; the first part follows."""
        known = {"nbytes": _MOST, "index": "f" * 100, "changed": 10**12 - 1}
        return sectors(8 + len(replace(self, **known)._text()))  # type: ignore[arg-type]

    @property
    def file_nbytes(self) -> int:
        """Bytes of the whole file."""
        return self.room + self.nbytes + self.index_nbytes

    def encoded(self) -> bytes:
        """Length and JSON, padded with spaces to its room. A header has this one form only."""
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
    """A block's fields, of each layer where layers differ, for the header."""
    texts = [
        [asdict(entry) | {"dtype": str(entry.dtype)} for entry in own] for own in layout.by_layer or [layout.fields]
    ]
    return json.dumps(texts if layout.by_layer else texts[0])


def read_header(path: Path) -> Header:
    """The header of a file, and that the file is as long as it says.

    Raises:
        ExpertcastError: the file is not ours, or cannot be read.
        StaleFileError: it is damaged, or of an older version.
    """
    try:
        with open_file(path) as file:
            begin = file.read(_MOST_HEADER)
    except OSError as error:
        raise ExpertcastError(f"cannot read {str(path)!r}: {error.strerror}; {REMEDY}") from error
    if not begin[8:].startswith(_ANY_VERSION):
        raise ExpertcastError(f"{str(path)!r} was not written by expertcast or is damaged: {REMEDY}")
    if not begin[8 + len(_ANY_VERSION) - len("expertcast-") :].startswith(_FORMAT.encode()):
        raise StaleFileError("it was made by an older version")
    try:
        metadata = json.loads(begin[8 : 8 + int.from_bytes(begin[:8], "little")])["__metadata__"]
        header = _HEADER.validate_json(metadata["header"], strict=True)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise StaleFileError("its header is damaged") from None
    if not begin.startswith(header.encoded()):
        raise StaleFileError("its header is damaged")
    found = path.stat().st_size
    if found != header.file_nbytes:
        raise StaleFileError(f"it has {found} bytes instead of {header.file_nbytes}")
    return header


class ExpertWriter:
    """Writes a file, expert by expert in the order of their keys. Until it is dropped, what was written can be read.

    Args:
        path: that the file gets when it is complete. None: it has no name, lies in the system's folder for temporary
            files, and is gone when no process has it open or mapped any more, however that ends.
        header: what it will say, but for its sizes.
        least: bytes that the parts of all experts take at least.

    Raises:
        ExpertcastError: the folder cannot be written, or has less room.
    """

    def __init__(self, path: Path | None, header: Header, least: int = 0) -> None:
        self._target, self._header = path, header
        self._folder = Path(tempfile.gettempdir()) if path is None else path.parent
        self._index: list[tuple[list[int], list[int], list[int]]] = []
        self._path: Path | None = None
        self._file: BinaryIO | None = None
        self._direct: FileIO | None = None
        """Writes past the page cache, where the file system can."""
        try:
            with self._failing():
                self._create()
                self._check_room(least)
                weakref.finalize(self, self._open.close)
                self._open.write(bytes(header.room))
                self._direct = _opened_direct(self._open.fileno())
        except BaseException:  # an interrupt too: an empty file would stay
            self.drop()
            raise

    def _create(self) -> None:
        """An empty file, to be written and read."""
        if self._target is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed by drop)
            self._path = _HANDLES / str(self._file.fileno())
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        _remove_left_over(self._target)
        while True:  # another process may remove it before it is locked
            self._path = self._target.with_name(f"{self._target.name}.{os.getpid()}-{next(_NUMBER)}{PARTIAL}")
            self._file = self._path.open("w+b")
            if _lock(self._file.fileno()) and self._path.exists():
                return
            self._file.close()

    def _check_room(self, least: int) -> None:
        free = shutil.disk_usage(self._folder).free
        if free < least:
            raise ExpertcastError(
                f"{str(self._folder)!r} has {free} bytes free and the experts take at least {least}: make room, or "
                "give another store_folder or codec"
            )

    def add(self, parts: Sequence[Part]) -> None:
        """The next expert.

        Raises:
            ExpertcastError: the disk has no room.
        """
        offsets = []
        with self._failing():
            for part in parts:
                offsets.append(self._open.tell())
                self._write(part.data)
                if not self._header.plain:
                    self._open.write(bytes(-len(part.data) % SECTOR))
        self._index.append((offsets, [len(part.data) for part in parts], [part.digest or 0 for part in parts]))

    def _write(self, data: Tensor) -> None:
        """Write bytes, whole sectors past the page cache: to make its pages takes longer than the disk."""
        view, start = data.numpy().data, self._open.tell()
        if self._direct is None or start % SECTOR or len(view) % SECTOR or data.data_ptr() % SECTOR:
            self._open.write(view)
            return
        self._direct.seek(start)
        while len(view):
            view = view[self._direct.write(view) :]
        self._open.seek(self._direct.tell())

    def flush(self) -> None:
        """Hand all that was added to the system: whoever added it may let go of it.

        Raises:
            ExpertcastError: the disk has no room.
        """
        with self._failing():
            self._open.flush()

    def read(self, key: int) -> list[Part]:
        """An expert that was added and flushed, for those whose packing failed."""
        return _read(self._open.fileno(), *self._index[key])

    def commit(self) -> ExpertFile:
        """All experts are written: add the index and the header, and give the file its name.

        Raises:
            ExpertcastError: the disk has no room.
        """
        assert self._path is not None
        numbers = zip(*self._index, strict=True)
        index = b"".join(
            np.array(own, dtype).tobytes() for own, dtype in zip(numbers, ("<i8", "<i8", "<u8"), strict=True)
        )
        file = self._open
        with self._failing():
            nbytes, changed = file.tell() - self._header.room, int(time.time()) - _LAST_MINUTE
            file.write(index)
            file.seek(0)
            file.write(replace(self._header, nbytes=nbytes, index=digest(index), changed=changed).encoded())
            file.flush()
            os.fsync(file.fileno())
            os.utime(file.fileno(), (changed, changed))
            complete = ExpertFile(self._path)  # before another process can give the name to a file of its own
            if self._target is None:
                complete.path = _HANDLES / str(complete.handle)
            else:
                os.replace(self._path, self._target)
                complete.path = self._target
            self._close()
        return complete

    def drop(self) -> None:
        """Remove what was written, unless it is complete."""
        if self._file is not None:
            if self._file.closed:
                return
            with contextlib.suppress(OSError):  # what was not written yet finds no room
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
    def _failing(self) -> Iterator[None]:
        """Turn an error of the system into one line; flushed bytes can still be read."""
        try:
            yield
        except OSError as error:
            raise ExpertcastError(
                f"cannot write to {str(self._folder)!r} ({error.strerror or error}): give another store_folder"
            ) from error


def _opened_direct(descriptor: int) -> FileIO | None:
    """Open an open file again, to write past the page cache; None where the file system cannot."""
    with contextlib.suppress(OSError, AttributeError):
        return FileIO(os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_DIRECT), "w")
    return None


def _lock(descriptor: int) -> bool:
    """Whether no other process has the file: a killed process no longer has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_left_over(path: Path) -> None:
    """Remove what processes that were killed while they packed have left."""
    for partial in path.parent.glob(f"{path.name}.*{PARTIAL}"):
        with contextlib.suppress(OSError), open_file(partial) as file:
            if _lock(file.fileno()):
                partial.unlink()


class ExpertFile:
    """A complete file: where the parts of its experts lie.

    Blocks of codec `raw` are used as they are, so that nothing compares them with their digests later: all of them are
    compared now if the file's time of change is not what the header says.

    Raises:
        ExpertcastError: the file is not ours.
        StaleFileError: it must be made again; the text says why.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = header = read_header(path)
        self.handle = os.open(path, os.O_RDONLY)
        """Leads to this file also when another one has taken its name."""
        weakref.finalize(self, os.close, self.handle)
        raw = read_range(self.handle, header.room + header.nbytes, header.index_nbytes)
        if digest(memoryview(raw)) != header.index:  # or it was replaced since its header was read
            raise StaleFileError("its index is damaged")
        numbers = np.frombuffer(raw, "<i8").reshape(3, header.count, header.parts)
        self.offsets: npt.NDArray[np.int64] = numbers[0]
        """[N, P] first byte of each part in the file."""
        self.nbytes: npt.NDArray[np.int64] = numbers[1]
        """[N, P]"""
        self.digests: npt.NDArray[np.uint64] = numbers[2].view("<u8")
        """[N, P]"""
        ends = self.offsets + self.nbytes
        if (self.nbytes < 1).any() or (self.offsets < header.room).any() or ends.max() > header.room + header.nbytes:
            raise StaleFileError("its index is damaged")
        if header.plain and os.fstat(self.handle).st_mtime != header.changed:
            self.verify()
            with contextlib.suppress(OSError):  # another user's, or read-only: it is verified whenever it is opened
                os.utime(self.handle, (header.changed, header.changed))
        self.stamp = stamp_of(self.handle)
        """Size and time of change of the file when it was checked."""

    def verify(self) -> None:
        """Compare every part with its digest.

        Raises:
            StaleFileError: one is damaged.
        """
        for key in range(self.header.count):
            for index, part in enumerate(self.read(key)):
                if not part.intact():
                    raise StaleFileError(f"part {index} of expert {key} is damaged")

    def read(self, key: int) -> list[Part]:
        """An expert's parts, read now and not compared with their digests."""
        return _read(self.handle, self.offsets[key].tolist(), self.nbytes[key].tolist(), self.digests[key].tolist())


class MappedBlocks:
    """The blocks of a file of codec `raw`, mapped: what is written to them does not reach the file."""

    def __init__(self, file: ExpertFile) -> None:
        self._handle, self._header = file.handle, file.header
        header = file.header
        self._mapping = mmap.mmap(file.handle, header.file_nbytes, access=mmap.ACCESS_COPY)
        blocks = torch.frombuffer(self._mapping, dtype=torch.uint8, count=header.nbytes, offset=header.room)
        self.layers: tuple[Tensor, ...] = blocks.view(header.layers, -1).unbind(0)
        """uint8 [E * block_bytes] of each layer; every tensor that views one keeps the mapping alive."""

    def read_ahead(self, keys: Iterable[int]) -> None:
        """Have the system read some experts' pages, in this order, and do not wait for them."""
        if hasattr(mmap, "MADV_WILLNEED"):
            for key in keys:
                start = self._header.room + key * self._header.block_bytes
                page = start - start % mmap.PAGESIZE
                self._mapping.madvise(mmap.MADV_WILLNEED, page, start + self._header.block_bytes - page)

    def forget(self) -> None:
        """Give the pages back to the system, as far as no other process has mapped them."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._handle, 0, 0, os.POSIX_FADV_DONTNEED)

    @property
    def cut_off(self) -> bool:
        """Whether the file is shorter than what is mapped of it."""
        return os.fstat(self._handle).st_size < len(self._mapping)


def _read(handle: int, offsets: list[int], sizes: list[int], digests: list[int]) -> list[Part]:
    """One expert's parts, which lie one after another; several threads may read at a time."""
    raw = read_range(handle, offsets[0], offsets[-1] + sizes[-1] - offsets[0])
    data = torch.frombuffer(raw, dtype=torch.uint8)
    parts = [data[start - offsets[0] :][:size] for start, size in zip(offsets, sizes, strict=True)]
    return [Part(part, digest) for part, digest in zip(parts, digests, strict=True)]


def packed_codec(folder: Path) -> str | None:
    """The codec of the store that lies in a folder; None: there is none.

    Raises:
        ExpertcastError: the file is damaged or not ours.
    """
    path = folder / FILE_NAME
    if not path.exists():
        return None
    try:
        return read_header(path).codec
    except StaleFileError as reason:
        raise _damaged(path, reason) from None


def verify_store(path: Path) -> None:
    """Compare all of a store's file with its digests.

    Args:
        path: the file, or its folder.

    Raises:
        ExpertcastError: it is missing, damaged or not ours.
    """
    path = path / FILE_NAME if path.is_dir() else path
    try:
        ExpertFile(path).verify()
    except StaleFileError as reason:
        raise _damaged(path, reason) from None


def _damaged(path: Path, reason: StaleFileError) -> ExpertcastError:
    """A store's file that is looked at, not used."""
    return ExpertcastError(f"{str(path)!r} is damaged: {reason}; remove it, and the next load packs the experts again")
