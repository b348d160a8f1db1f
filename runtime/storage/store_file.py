"""The file of a disk store: a safetensors file with one tensor of blocks per MoE layer.

    layer.0 ... layer.<L-1>     uint8 [E, block_bytes]; the first byte of each block at a multiple of 256
    __metadata__                format, fingerprint, model_id, layout, checksums (CRC-32 per layer), changed, and
                                header: the digest of all that (:mod:`expertcast.runtime.storage.store_header`)

A file is written under another name and renamed when it is complete. Its time of change is set back to the second
that the header names: whoever changes the file later also changes that, and then the checksums decide, when it is
opened: what is damaged can be packed again then, but not in the middle of a forward.

L MoE layers, E routed experts per layer.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import time
import weakref
import zlib
from pathlib import Path

import torch
from torch import Tensor

from expertcast.predictors.artefacts import warn_unsealed
from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.storage.direct_read import stamp_of
from expertcast.runtime.storage.draft import Draft
from expertcast.runtime.storage.store_header import StaleFileError, StoreFormat, StoreHeader, read_header

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
        except OSError as error:
            draft.drop()
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
