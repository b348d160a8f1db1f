"""The file of a store of coded experts: parts of any length, each in sectors of its own, and an index behind them.

    [ header, whole sectors | parts of expert 0 | parts of expert 1 | ... | index ]

The parts of one expert lie one after another, so that all of them, or some neighbours, are one request. It is a
safetensors file (:mod:`expertcast.runtime.storage.coded_header`), written under another name and renamed when it is
complete.

N experts of all layers, P parts of each.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from expertcast.data.tensor_files import read_range
from expertcast.predictors.artefacts import digest
from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.storage.codecs import Part
from expertcast.runtime.storage.coded_header import CodedHeader, read_coded_header
from expertcast.runtime.storage.direct_read import SECTOR, sectors
from expertcast.runtime.storage.draft import Draft
from expertcast.runtime.storage.store_file import FILE_NAME as RAW_NAME
from expertcast.runtime.storage.store_file import damaged
from expertcast.runtime.storage.store_header import StaleFileError

FILE_NAME = "experts.coded.safetensors"

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
        except OSError as error:
            self.drop()
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
    path = folder / FILE_NAME
    if not path.exists():
        return "raw" if (folder / RAW_NAME).exists() else None
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
