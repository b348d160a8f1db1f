"""The file of a store of coded experts: parts of any length, each in sectors of its own, and an index behind them.

    [ header, whole sectors | parts of expert 0 | parts of expert 1 | ... | index ]

The parts of one expert lie one after another, so that all of them, or some neighbours, are one request. It is a
safetensors file (:mod:`expertcast.runtime.storage.coded_header`), written under another name and renamed when it is
complete.

N experts of all layers, P parts of each.
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
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, NotRequired, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from pydantic import ConfigDict, Field
from torch import Tensor
from typing_extensions import TypedDict

from expertcast.data.trace_format import read_range
from expertcast.predictors.artefacts import CLOSED, digest, open_file, parse_json, warn_unsealed
from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.storage.codecs import Part
from expertcast.runtime.storage.layout import BlockLayout
from expertcast.runtime.storage.reader import SECTOR, sectors, stamp_of

# A store's file while it is written: beside its place under another name, or without any name at all.
#
# What a killed process leaves is of no use and as large as the model. A file without a name leaves nothing; one that
# will have a name is locked while it is written, and removed by the next process that packs into its folder.

PARTIAL = ".partial"
_HANDLES = Path("/proc/self/fd")
_NUMBER = itertools.count()


class Draft:
    """Where a file is written.

    Args:
        path: that it gets when it is complete. None: it has no name, is in the system's folder for temporary files, and
            is gone when no process has it open or mapped any more, however that ends
            (where :func:`can_be_nameless`).
    """

    def __init__(self, path: Path | None) -> None:
        self._target = path
        self.folder = Path(tempfile.gettempdir()) if path is None else path.parent
        self.path = self.folder if path is None else path
        """Where it is found, once it is open: a nameless one by this process, as long as the draft is held."""
        self._file: BinaryIO | None = None

    def open(self) -> BinaryIO:
        """Make it, empty; to be written and read.

        Raises:
            OSError: the folder cannot be written.
        """
        if self._target is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed by drop)
            self.path = _HANDLES / str(self._file.fileno())
            weakref.finalize(self, self._file.close)
            return self._file
        self.folder.mkdir(parents=True, exist_ok=True)
        _remove_left_over(self._target)
        self.path = self._target.with_name(f"{self._target.name}.{os.getpid()}-{next(_NUMBER)}{PARTIAL}")
        try:
            self._file = self.path.open("w+b")
            weakref.finalize(self, self._file.close)
            _lock(self._file.fileno())  # as long as anything has it open or mapped
        except BaseException:  # an interrupt too: nobody removes an empty file later
            self.drop()
            raise
        return self._file

    def commit(self) -> None:
        """It is complete: give it its name.

        Raises:
            OSError: the system does not.
        """
        if self._target is not None:
            assert self._file is not None, "it was not opened"
            self._file.close()
            os.replace(self.path, self._target)
            self.path = self._target

    def drop(self) -> None:
        """Let go of it, and remove it unless it has its name."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # what was not written yet finds no room
                self._file.close()
        if self._target not in (None, self.path):
            with contextlib.suppress(OSError):
                self.path.unlink()


def can_be_nameless() -> bool:
    """Whether this system opens a file without a name again, by the handle that a process has of it."""
    return _HANDLES.is_dir()


def _lock(descriptor: int) -> bool:
    """Whether nobody else has the file: a process that was killed has it no more."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_left_over(path: Path) -> None:
    """Remove what processes that were killed while they packed have left."""
    for partial in path.parent.glob(f"{path.name}.*{PARTIAL}"):
        with contextlib.suppress(OSError), open_file(partial) as file:
            if partial.stat().st_size and _lock(file.fileno()):  # an empty one is about to be locked
                partial.unlink()


# What a disk store's file says of itself: a safetensors header with one tensor of blocks per MoE layer.
#
# A header has one form only. Reading takes its few values by a schema, makes the header anew from them, and compares
# the bytes: whatever else is changed, moved or added in it is noticed, a digit of a checksum by the digest `header`.
#
# L MoE layers, E routed experts per layer.

T = TypeVar("T")

REMEDY = "remove it or give another store_folder"
_FORMAT = "expertcast-store-1"
_OURS = f'{{"__metadata__": {{"format": "{_FORMAT}", '.encode()
_PAGE = 4096
_MOST_LAYERS = 10_000
_MOST_HEADER = 1 << 22
"""Bytes: more than so many layers take."""


class StaleFileError(Exception):
    """The file is ours, but not of these weights, incomplete or damaged: it must be made again."""


class _Metadata(TypedDict):
    __pydantic_config__ = CLOSED  # type: ignore[misc]
    format: Literal["expertcast-store-1"]
    fingerprint: Annotated[str, Field(max_length=10_000)]
    model_id: Annotated[str, Field(max_length=10_000)]
    layout: Annotated[str, Field(max_length=1_000_000)]
    checksums: Annotated[str, Field(pattern=r"^[0-9a-f]{8}( [0-9a-f]{8})*$", max_length=9 * _MOST_LAYERS)]
    changed: Annotated[str, Field(pattern=r"^[0-9]{12}$")]
    header: NotRequired[str]


class _Blocks(TypedDict):
    __pydantic_config__ = CLOSED  # type: ignore[misc]
    dtype: Literal["U8"]
    shape: Annotated[list[Annotated[int, Field(ge=1, le=1 << 40)]], Field(min_length=2, max_length=2)]
    data_offsets: list[int]


_Entries = TypedDict("_Entries", {"__metadata__": _Metadata, "layer.0": _Blocks})
"""The other layers follow from these."""
_Entries.__pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFormat:
    """What blocks a file holds, and of what; equal where the blocks are."""

    layers: int
    experts: int
    block_bytes: int
    layout: str
    """A block's fields, as :func:`layout_text` says them."""
    model_id: str = field(compare=False)
    fingerprint: str
    """Of the weights' origin."""

    @property
    def layer_nbytes(self) -> int:
        """Bytes of one layer's blocks."""
        return self.experts * self.block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHeader:
    """All that a header says."""

    form: StoreFormat
    checksums: list[int]
    """CRC-32 per layer."""
    changed: int
    """Seconds since 1970: the file's time of change, as long as nobody changes it."""
    sealed: bool = True
    """Whether it holds its own digest, which older files lack."""

    def encoded(self) -> bytes:
        """Length and JSON, padded with spaces to whole pages; the same length whatever the checksums are."""
        form = self.form
        metadata = {
            "format": _FORMAT,
            "fingerprint": form.fingerprint,
            "model_id": form.model_id,
            "layout": form.layout,
            "checksums": " ".join(f"{checksum:08x}" for checksum in self.checksums),
            "changed": f"{self.changed:012d}",
        }
        entries: dict[str, object] = {"__metadata__": metadata}
        for layer in range(form.layers):
            start = layer * form.layer_nbytes
            shape = [form.experts, form.block_bytes]
            offsets = [start, start + form.layer_nbytes]
            entries[f"layer.{layer}"] = {"dtype": "U8", "shape": shape, "data_offsets": offsets}
        if self.sealed:
            metadata["header"] = digest(json.dumps(entries).encode())
        text = json.dumps(entries).encode()
        size = -(-(8 + len(text)) // _PAGE) * _PAGE - 8
        return size.to_bytes(8, "little") + text.ljust(size)


def layout_text(layout: BlockLayout) -> str:
    """A block's fields, for the header."""
    return json.dumps([asdict(entry) | {"dtype": str(entry.dtype)} for entry in layout.fields])


def read_header(path: Path) -> StoreHeader:
    """The header of a file, and that the file is as long as it says.

    Raises:
        ExpertcastError: the file is not ours, or cannot be read.
        StaleFileError: it is damaged; the text says how.
    """
    begin, entries = begin_of(path, _OURS, _Entries)
    header = _from_entries(entries)
    encoded = header.encoded()
    check_whole(path, begin, encoded, len(encoded) + header.form.layers * header.form.layer_nbytes)
    return header


def begin_of(path: Path, ours: bytes, schema: type[T]) -> tuple[bytes, T]:
    """The first bytes of a file, as many as a header may take, and the header's entries in them.

    Args:
        path: of the file.
        ours: what the header of such a file begins with.
        schema: of its entries.

    Raises:
        ExpertcastError: the file is not ours, or cannot be read.
        StaleFileError: its header is damaged.
    """
    begin = _begin(path)
    if not begin[8:].startswith(ours):
        raise ExpertcastError(f"{str(path)!r} was not written by expertcast or is damaged: {REMEDY}")
    try:
        return begin, parse_json(begin[8 : 8 + int.from_bytes(begin[:8], "little")], schema, "header", REMEDY)
    except ExpertcastError:
        raise StaleFileError("its header is damaged") from None


def check_whole(path: Path, begin: bytes, encoded: bytes, size: int) -> None:
    """That a file begins with its header as it was `encoded` anew, and has `size` bytes.

    Raises:
        StaleFileError: it does not.
    """
    if not begin.startswith(encoded):
        raise StaleFileError("its header is damaged")
    found = path.stat().st_size
    if found != size:
        raise StaleFileError(f"it has {found} bytes instead of {size}")


def _begin(path: Path) -> bytes:
    """As much as a header may take."""
    try:
        with open_file(path) as file:
            return file.read(_MOST_HEADER)
    except OSError as error:
        raise ExpertcastError(f"cannot read {str(path)!r}: {error.strerror}; {REMEDY}") from error


def _from_entries(entries: _Entries) -> StoreHeader:
    metadata, (experts, block_bytes) = entries["__metadata__"], entries["layer.0"]["shape"]
    checksums = [int(word, 16) for word in metadata["checksums"].split()]
    form = StoreFormat(
        layers=len(checksums), experts=experts, block_bytes=block_bytes, layout=metadata["layout"],
        model_id=metadata["model_id"], fingerprint=metadata["fingerprint"],
    )  # fmt: skip
    return StoreHeader(form=form, checksums=checksums, changed=int(metadata["changed"]), sealed="header" in metadata)


# The file of a disk store: a safetensors file with one tensor of blocks per MoE layer.
#
#     layer.0 ... layer.<L-1>     uint8 [E, block_bytes]; the first byte of each block at a multiple of 256
#     __metadata__                format, fingerprint, model_id, layout, checksums (CRC-32 per layer), changed, and
#                                 header: the digest of all that (:mod:`expertcast.runtime.storage.expert_file`)
#
# A file is written under another name and renamed when it is complete. Its time of change is set back to the second
# that the header names: whoever changes the file later also changes that, and then the checksums decide, when it is
# opened: what is damaged can be packed again then, but not in the middle of a forward.
#
# L MoE layers, E routed experts per layer.

FILE_NAME = "experts.safetensors"


class StoreFile:
    """A mapped file. Made by :meth:`create` and :meth:`commit`, or :meth:`open`."""

    def __init__(
        self, path: Path, form: StoreFormat, mapping: mmap.mmap, start: int, checksums: list[int],
        handle: int, draft: Draft | None = None,
    ) -> None:  # fmt: skip
        self.path = path
        self.handle = handle
        """Leads to this file also when another one has taken its name."""
        self.stamp = stamp_of(handle)
        """Of the file when it was opened and found right."""
        self.draft = draft
        """Until the file is complete."""
        self.form = form
        self._mapping = mapping
        self._start = start
        self._checksums = checksums
        self.bytes = torch.frombuffer(mapping, dtype=torch.uint8)
        """uint8, the whole file; every tensor that views it keeps the mapping alive."""

    def offset(self, layer: int) -> int:
        """Where a layer's blocks begin."""
        return self._start + layer * self.form.layer_nbytes

    def layer(self, layer: int) -> Tensor:
        """uint8 [E * block_bytes]."""
        start = self.offset(layer)
        return self.bytes[start : start + self.form.layer_nbytes]

    @classmethod
    def create(cls, draft: Draft, form: StoreFormat) -> StoreFile:
        """An empty file of the full size, mapped for writing.

        Raises:
            ExpertcastError: the folder cannot be written, or the disk has no room.
        """
        header = StoreHeader(form=form, checksums=[0] * form.layers, changed=0).encoded()
        size = len(header) + form.layers * form.layer_nbytes
        try:
            file = draft.open()
            _reserve(file.fileno(), size, draft.folder)
            mapping = mmap.mmap(file.fileno(), size)
        except BaseException as error:
            draft.drop()
            if not isinstance(error, OSError):
                raise
            raise ExpertcastError(
                f"cannot write {size} bytes to {str(draft.folder)!r} ({error.strerror or error}): give another "
                "store_folder"
            ) from error
        return cls(draft.path, form, mapping, len(header), [0] * form.layers, file.fileno(), draft)

    def close_layer(self, layer: int) -> None:
        """A layer is written: take its checksum and let its pages go."""
        self._checksums[layer] = _checksum(self.layer(layer))
        self._mapping.flush()
        self.forget()

    def forget(self) -> None:
        """Drop this process's hold on the pages; they stay in the system's cache while there is room."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED)

    def cut_off(self) -> bool:
        """Whether the file is shorter than what is mapped of it."""
        return os.fstat(self.handle).st_size < len(self._mapping)

    def drop_cached(self) -> None:
        """Have the system drop the file's pages that are clean and that no process has mapped."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.handle, 0, 0, os.POSIX_FADV_DONTNEED)

    def commit(self) -> StoreFile:
        """All layers are written: complete the header and give the file its name.

        Returns:
            The same file, mapped anew: nothing can be written to it any more.
        """
        assert self.draft is not None, "the file was complete"
        changed = int(time.time()) - 60
        header = StoreHeader(form=self.form, checksums=self._checksums, changed=changed).encoded()
        self._mapping[: len(header)] = header
        self._mapping.flush()
        os.fsync(self.handle)
        os.utime(self.path, (changed, changed))
        complete = StoreFile.open(self.path)  # before another process can give the name to a file of its own
        self.draft.commit()
        complete.path, self.draft = self.draft.path, None
        return complete

    @classmethod
    def open(cls, path: Path, form: StoreFormat | None = None) -> StoreFile:
        """Map a complete file, which must hold the blocks of `form` where that is given.

        Raises:
            ExpertcastError: the file is not ours.
            StaleFileError: it must be made again; the text says why.
        """
        header = read_header(path)
        if form not in (None, header.form):
            raise StaleFileError(f"it was made from other weights, of {header.form.model_id!r}")
        if not header.sealed:
            warn_unsealed(path)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)  # no write can reach the file
            handle = os.dup(file.fileno())
        encoded = header.encoded()
        opened = cls(path, header.form, mapping, len(encoded), header.checksums, handle)
        weakref.finalize(opened, os.close, handle)
        if mapping[: len(encoded)] != encoded:
            raise StaleFileError("it was replaced while it was opened")
        if os.fstat(handle).st_mtime != header.changed:
            opened.verify()
            with contextlib.suppress(OSError):  # another user's, or read-only: it is verified whenever it is opened
                os.utime(handle, (header.changed, header.changed))
            opened.stamp = stamp_of(handle)
        return opened

    def verify(self) -> None:
        """Compare every layer with its checksum.

        Raises:
            StaleFileError: one is damaged.
        """
        for layer, expected in enumerate(self._checksums):
            if _checksum(self.layer(layer)) != expected:
                raise StaleFileError(f"layer {layer} is damaged")
        self.forget()


def verify_store(path: Path) -> None:
    """Check all of a store's file, by the checksums also where its time of change is as it was.

    Args:
        path: the file, or its folder.

    Raises:
        ExpertcastError: it is missing, damaged or not ours.
    """
    path = path / FILE_NAME if path.is_dir() else path
    try:
        StoreFile.open(path).verify()
    except StaleFileError as reason:
        raise damaged(path, reason) from None


def damaged(path: Path, reason: StaleFileError) -> ExpertcastError:
    """A store's file that is looked at, not used."""
    return ExpertcastError(f"{str(path)!r} is damaged: {reason}; remove it, and the next load packs the experts again")


def _checksum(blocks: Tensor) -> int:
    return zlib.crc32(blocks.numpy().data)


def _reserve(descriptor: int, size: int, folder: Path) -> None:
    """Room on the disk now: a write through the mapping that finds none would kill the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    elif shutil.disk_usage(folder).free < size:
        raise OSError("no space left on device")
    else:
        os.ftruncate(descriptor, size)


# What a file of coded experts says of itself: a safetensors header over the experts' parts and their index.
#
# As of the file of plain blocks (:mod:`expertcast.runtime.storage.expert_file`), a header has one form only: it is made
# anew from its values when it is read, and compared.
#
# N experts of all layers, P parts of each.

_CODED_FORMAT = "expertcast-coded-1"
_CODED_OURS = f'{{"__metadata__": {{"format": "{_CODED_FORMAT}", '.encode()
_MOST = 10**15
"""Bytes: no file is larger, and the header has room for the number."""
WORD = 8
"""Bytes of a number in the index."""


class _CodedMetadata(TypedDict):
    __pydantic_config__ = CLOSED  # type: ignore[misc]
    format: Literal["expertcast-coded-1"]
    fingerprint: Annotated[str, Field(max_length=10_000)]
    model_id: Annotated[str, Field(max_length=10_000)]
    layout: Annotated[str, Field(max_length=1_000_000)]
    codec: Annotated[str, Field(max_length=1_000)]
    layers: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,5}$")]
    experts: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,5}$")]
    block_bytes: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,11}$")]
    parts: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,3}$")]
    index: Annotated[str, Field(max_length=100)]
    header: str


class _Parts(TypedDict):
    __pydantic_config__ = CLOSED  # type: ignore[misc]
    dtype: Literal["U8"]
    shape: Annotated[list[Annotated[int, Field(ge=1, le=_MOST)]], Field(min_length=1, max_length=1)]
    data_offsets: list[int]


_CodedEntries = TypedDict("_CodedEntries", {"__metadata__": _CodedMetadata, "parts": _Parts})
"""The index follows from these."""
_CodedEntries.__pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedHeader:
    """All that a header says."""

    form: StoreFormat
    codec: str
    """As :attr:`expertcast.runtime.storage.codecs.Codec.text` says it."""
    parts: int
    """P"""
    nbytes: int = _MOST
    """Of all experts' parts, padding included."""
    index: str = ""
    """Digest of the index."""

    @property
    def count(self) -> int:
        """N"""
        return self.form.layers * self.form.experts

    @property
    def index_nbytes(self) -> int:
        """Bytes of the index: of each part its first byte in the file, its bytes and its digest."""
        return 3 * WORD * self.count * self.parts

    @property
    def room(self) -> int:
        """Bytes of the header, whatever `nbytes` and `index` are: the first part follows."""
        largest = CodedHeader(form=self.form, codec=self.codec, parts=self.parts, index="f" * 100)
        return sectors(8 + len(largest._text()))

    def encoded(self) -> bytes:
        """Length and JSON, padded with spaces to its room."""
        size = self.room - 8
        return size.to_bytes(8, "little") + self._text().ljust(size)

    def _text(self) -> bytes:
        form = self.form
        metadata = {
            "format": _CODED_FORMAT, "fingerprint": form.fingerprint, "model_id": form.model_id, "layout": form.layout,
            "codec": self.codec, "layers": str(form.layers), "experts": str(form.experts),
            "block_bytes": str(form.block_bytes), "parts": str(self.parts), "index": self.index,
        }  # fmt: skip
        entries: dict[str, object] = {"__metadata__": metadata}
        entries["parts"] = {"dtype": "U8", "shape": [self.nbytes], "data_offsets": [0, self.nbytes]}
        start, size = self.nbytes, self.index_nbytes // 3
        for name, dtype in (("offsets", "I64"), ("nbytes", "I64"), ("digests", "U64")):
            shape = [self.count, self.parts]
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}
            start += size
        metadata["header"] = digest(json.dumps(entries).encode())
        return json.dumps(entries).encode()


def read_coded_header(path: Path) -> CodedHeader:
    """The header of a file, and that the file is as long as it says.

    Raises:
        ExpertcastError: the file is not ours, or cannot be read.
        StaleFileError: it is damaged; the text says how.
    """
    begin, entries = begin_of(path, _CODED_OURS, _CodedEntries)
    said = entries["__metadata__"]
    form = StoreFormat(
        layers=int(said["layers"]), experts=int(said["experts"]), block_bytes=int(said["block_bytes"]),
        layout=said["layout"], model_id=said["model_id"], fingerprint=said["fingerprint"],
    )  # fmt: skip
    header = CodedHeader(
        form=form, codec=said["codec"], parts=int(said["parts"]), nbytes=entries["parts"]["shape"][0],
        index=said["index"],
    )  # fmt: skip
    check_whole(path, begin, header.encoded(), header.room + header.nbytes + header.index_nbytes)
    return header


CODED_FILE_NAME = "experts.coded.safetensors"

Index = npt.NDArray[np.int64]


class CodedWriter:
    """Writes a file, expert by expert in the order of their keys. Until it is dropped, what was written can be read.

    Args:
        draft: where it is written.
        header: what it will say, but for its sizes.

    Raises:
        ExpertcastError: the folder cannot be written.
    """

    def __init__(self, draft: Draft, header: CodedHeader) -> None:
        self._draft, self._header = draft, header
        self._index: list[tuple[list[int], list[int], list[int]]] = []
        try:
            self._file: BinaryIO = draft.open()
            self._file.write(bytes(header.room))
        except BaseException as error:
            self.drop()
            if not isinstance(error, OSError):
                raise
            raise self._failed(error) from error

    def add(self, parts: Sequence[Part]) -> None:
        """The next expert.

        Raises:
            ExpertcastError: the disk has no room.
        """
        offsets = []
        try:
            for part in parts:
                offsets.append(self._file.tell())
                self._file.write(part.data.numpy().data)
                self._file.write(bytes(-len(part.data) % SECTOR))
        except OSError as error:
            raise self._failed(error) from error
        self._index.append((offsets, [len(part.data) for part in parts], [part.digest or 0 for part in parts]))

    def flush(self) -> None:
        """Hand all that was added to the system: whoever added it may let go of it.

        Raises:
            ExpertcastError: the disk has no room.
        """
        try:
            self._file.flush()
        except OSError as error:
            raise self._failed(error) from error

    def read(self, key: int) -> list[Part]:
        """An expert that was added and flushed, for those whose packing failed."""
        handle = os.open(self._draft.path, os.O_RDONLY)
        try:
            return _read(handle, *self._index[key])
        finally:
            os.close(handle)

    def commit(self) -> CodedFile:
        """All experts are written: add the index and the header, and give the file its name.

        Returns:
            The file.

        Raises:
            ExpertcastError: the disk has no room.
        """
        offsets, sizes, digests = zip(*self._index, strict=True)
        index = b"".join(
            (np.array(offsets, "<i8").tobytes(), np.array(sizes, "<i8").tobytes(), np.array(digests, "<u8").tobytes())
        )
        try:
            end = self._file.tell()
            self._file.write(index)
            self._file.seek(0)
            self._file.write(replace(self._header, nbytes=end - self._header.room, index=digest(index)).encoded())
            self._file.flush()
            os.fsync(self._file.fileno())
            complete = CodedFile(self._draft.path)  # before another process can give the name to a file of its own
            self._draft.commit()
        except OSError as error:
            raise self._failed(error) from error
        complete.path = self._draft.path
        return complete

    def drop(self) -> None:
        """Remove what was written, unless it has its name."""
        self._draft.drop()

    def _failed(self, error: OSError) -> ExpertcastError:
        folder = str(self._draft.folder)
        return ExpertcastError(f"cannot write to {folder!r} ({error.strerror or error}): give another store_folder")


class CodedFile:
    """A complete file: where the parts of its experts lie.

    Raises:
        ExpertcastError: the file is not ours.
        StaleFileError: it must be made again; the text says why.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = header = read_coded_header(path)
        self.handle = os.open(path, os.O_RDONLY)
        """Leads to this file also when another one has taken its name."""
        weakref.finalize(self, os.close, self.handle)
        with open(self.handle, "rb", closefd=False) as file:
            file.seek(header.room + header.nbytes)
            raw = file.read(header.index_nbytes)
        if digest(raw) != header.index:  # or it was replaced since its header was read
            raise StaleFileError("its index is damaged")
        shape = header.count, header.parts
        numbers = np.frombuffer(raw, "<i8").reshape(3, *shape)
        self.offsets: Index = numbers[0]
        """[N, P] first byte of each part in the file."""
        self.nbytes: Index = numbers[1]
        """[N, P]"""
        self.digests: npt.NDArray[np.uint64] = numbers[2].view("<u8")
        """[N, P]"""
        ends = self.offsets + self.nbytes
        if (self.nbytes < 1).any() or (self.offsets < header.room).any() or ends.max() > header.room + header.nbytes:
            raise StaleFileError("its index is damaged")

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

    def span(self, key: int) -> int:
        """Bytes in whole sectors from an expert's first part to the end of its last."""
        return int(self.offsets[key, -1] - self.offsets[key, 0]) + sectors(int(self.nbytes[key, -1]))


def _read(handle: int, offsets: list[int], sizes: list[int], digests: list[int]) -> list[Part]:
    """One expert's parts, which lie one after another; several threads may read at a time."""
    raw = read_range(handle, offsets[0], offsets[-1] + sizes[-1] - offsets[0])
    data = torch.frombuffer(raw, dtype=torch.uint8)
    parts = [data[start - offsets[0] :][:size] for start, size in zip(offsets, sizes, strict=True)]
    return [Part(part, digest) for part, digest in zip(parts, digests, strict=True)]


def packed_codec(folder: Path) -> str | None:
    """The codec of the store that lies in a folder, a coded one before a raw one; None: there is none.

    Raises:
        ExpertcastError: the file is damaged or not ours.
    """
    path = folder / CODED_FILE_NAME
    if not path.exists():
        return "raw" if (folder / FILE_NAME).exists() else None
    try:
        return read_coded_header(path).codec
    except StaleFileError as reason:
        raise damaged(path, reason) from None


def verify_coded(path: Path) -> None:
    """Check all of a file of coded experts.

    Raises:
        ExpertcastError: it is damaged or not ours.
    """
    try:
        CodedFile(path).verify()
    except StaleFileError as reason:
        raise damaged(path, reason) from None
