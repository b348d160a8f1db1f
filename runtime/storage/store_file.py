"""The file of a disk store: a safetensors file with one tensor of blocks per MoE layer.

    layer.0 ... layer.<L-1>     uint8 [E, block_bytes]; the first byte of each block at a multiple of 256
    __metadata__                format, fingerprint, model_id, layout, checksums (CRC-32 per layer), changed

A file is written under another name and renamed when it is complete. Its time of change is set back to the second
that the header names: whoever changes the file later also changes that, and then the checksums decide.

L MoE layers, E routed experts per layer.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.storage.layout import BlockLayout

FILE_NAME = "experts.safetensors"
_FORMAT = "expertcast-store-1"
_PAGE = 4096
_MOST_HEADER = 100_000_000
_NAMES = {"fingerprint", "model_id", "layout", "checksums", "changed"}


class StaleFileError(Exception):
    """The file is ours, but not of these weights, incomplete or damaged: it must be made again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFormat:
    """What the header says of the content."""

    layers: int
    experts: int
    layout: BlockLayout
    model_id: str
    fingerprint: str
    """Of the weights' origin."""

    @property
    def layer_nbytes(self) -> int:
        """Bytes of one layer's blocks."""
        return self.experts * self.layout.block_bytes

    def header(self, checksums: list[int], changed: int) -> bytes:
        """Length and JSON, padded with spaces to whole pages; the same length whatever the checksums are."""
        metadata = {
            "format": _FORMAT,
            "fingerprint": self.fingerprint,
            "model_id": self.model_id,
            "layout": self.layout_text(),
            "checksums": " ".join(f"{checksum:08x}" for checksum in checksums),
            "changed": f"{changed:012d}",
        }
        entries: dict[str, object] = {"__metadata__": metadata}
        for layer in range(self.layers):
            start = layer * self.layer_nbytes
            shape = [self.experts, self.layout.block_bytes]
            offsets = [start, start + self.layer_nbytes]
            entries[f"layer.{layer}"] = {"dtype": "U8", "shape": shape, "data_offsets": offsets}
        text = json.dumps(entries).encode()
        size = -(-(8 + len(text)) // _PAGE) * _PAGE - 8
        return size.to_bytes(8, "little") + text.ljust(size)

    def layout_text(self) -> str:
        """A block's fields, for the header."""
        return json.dumps([asdict(entry) | {"dtype": str(entry.dtype)} for entry in self.layout.fields])


class StoreFile:
    """A mapped file. Made by :meth:`create` and :meth:`commit`, or :meth:`open`."""

    def __init__(self, path: Path, form: StoreFormat, mapping: mmap.mmap, start: int, checksums: list[int]) -> None:
        self.path = path
        self.form = form
        self._mapping = mapping
        self._start = start
        self._checksums = checksums
        self.bytes = torch.frombuffer(mapping, dtype=torch.uint8)
        """uint8, the whole file; every tensor that views it keeps the mapping alive."""

    def layer(self, layer: int) -> Tensor:
        """uint8 [E * block_bytes]."""
        start = self._start + layer * self.form.layer_nbytes
        return self.bytes[start : start + self.form.layer_nbytes]

    @classmethod
    def create(cls, path: Path, form: StoreFormat) -> StoreFile:
        """An empty file of the full size beside `path`, mapped for writing.

        Raises:
            ExpertcastError: the folder cannot be written, or the disk has no room.
        """
        header = form.header([0] * form.layers, 0)
        size = len(header) + form.layers * form.layer_nbytes
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("w+b") as file:
                _reserve(file.fileno(), size, path.parent)
                mapping = mmap.mmap(file.fileno(), size)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise ExpertcastError(
                f"cannot write {size} bytes to {str(path.parent)!r} ({error.strerror or error}): give another "
                "store_folder"
            ) from error
        return cls(partial, form, mapping, len(header), [0] * form.layers)

    def close_layer(self, layer: int) -> None:
        """A layer is written: take its checksum and let its pages go."""
        self._checksums[layer] = _checksum(self.layer(layer))
        self._mapping.flush()
        self.forget()

    def forget(self) -> None:
        """Drop this process's hold on the pages; they stay in the system's cache while there is room."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED)

    def commit(self, path: Path) -> None:
        """All layers are written: complete the header and give the file its name."""
        changed = int(time.time()) - 60
        header = self.form.header(self._checksums, changed)
        self._mapping[: len(header)] = header
        self._mapping.flush()
        with self.path.open("rb") as file:
            os.fsync(file.fileno())
        os.utime(self.path, (changed, changed))
        os.replace(self.path, path)
        self.path = path

    @classmethod
    def open(cls, path: Path, form: StoreFormat) -> StoreFile:
        """Map a complete file.

        Raises:
            ExpertcastError: the file is not ours.
            StaleFileError: it must be made again; the text says why.
        """
        metadata, start = read_header(path)
        if metadata["fingerprint"] != form.fingerprint or metadata["layout"] != form.layout_text():
            raise StaleFileError(f"it was made from other weights, of {metadata['model_id']!r}")
        try:
            checksums = [int(word, 16) for word in metadata["checksums"].split()]
            changed = int(metadata["changed"])
        except ValueError:
            raise StaleFileError("its header is damaged") from None
        if start != len(form.header(checksums, changed)) or len(checksums) != form.layers:
            raise StaleFileError("its header is damaged")
        size = start + form.layers * form.layer_nbytes
        if path.stat().st_size != size:
            raise StaleFileError(f"it has {path.stat().st_size} bytes instead of {size}")
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)  # no write can reach the file
        opened = cls(path, form, mapping, start, checksums)
        if path.stat().st_mtime != changed:
            opened._verify()
            os.utime(path, (changed, changed))
        return opened

    def _verify(self) -> None:
        for layer, expected in enumerate(self._checksums):
            if _checksum(self.layer(layer)) != expected:
                raise StaleFileError(f"layer {layer} is damaged")
        self.forget()


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


def read_header(path: Path) -> tuple[dict[str, str], int]:
    """The metadata of a file of ours, and where its data starts.

    Raises:
        ExpertcastError: the file is not ours, or its header is damaged.
    """
    foreign = ExpertcastError(
        f"{str(path)!r} was not written by expertcast or is damaged: remove it or give another store_folder"
    )
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > _MOST_HEADER:
                raise foreign
            metadata = json.loads(file.read(size))["__metadata__"]
    except OSError as error:
        raise ExpertcastError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError):
        raise foreign from None
    if not isinstance(metadata, dict) or metadata.get("format") != _FORMAT or not metadata.keys() >= _NAMES:
        raise foreign
    return metadata, 8 + size
